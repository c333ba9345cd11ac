"""Tables and plot of what bench_seam.py measured; needs no GPU.

Results are {"environment", "copy_gb_s", "rows", "per_kernel"}. A row has hidden, tokens, floor and
the us of each column that was timed. An entry of per_kernel has hidden, tokens, and for "unfused"
and "best" a list of [kernel, us], each replayed alone, and the us of all of them "together".
"""

COLUMNS = ("eager", "torch.compile", "unfused", "portable", "best")


def tables(results):
    """All of them, as Markdown."""
    found = [kernel_table(entry) for entry in results["per_kernel"]]
    for rows in by_hidden_size(results).values():
        found += [time_table(rows), share_table(rows, results["copy_gb_s"])]
    return "\n\n".join(found)


def kernel_table(entry):
    """us of each kernel, of all of them, and how many times faster `best` is."""
    rows = []
    alone, together = {}, {}
    for chain in ("unfused", "best"):
        rows += [(f"{chain}: {kernel}", f"{us:,.1f}") for kernel, us in entry[chain]]
        alone[chain] = sum(us for _, us in entry[chain])
        together[chain] = entry[f"{chain} together"]
        rows.append((f"{chain}: sum of these, each alone", f"{alone[chain]:,.1f}"))
        rows.append((f"{chain}: one after the other", f"{together[chain]:,.1f}"))
    for how, us in (("each alone", alone), ("one after the other", together)):
        rows.append((f"speedup, {how}", f"{us['unfused'] / us['best']:.2f}x"))
    return markdown((f"H = {entry['hidden']}, T = {entry['tokens']:,}", "us"), rows)


def time_table(rows):
    columns = [*timed(rows), "floor"]
    cells = [
        (f"{row['tokens']:,}", *(f"{row[c]:,.1f}" if c in row else "" for c in columns))
        for row in rows
    ]
    return markdown((f"H = {rows[0]['hidden']}, us at T", *columns), cells)


def share_table(rows, copy_gb_s):
    columns = timed(rows)
    cells = [
        (f"{row['tokens']:,}", *(f"{share(row, c):.0%}" if c in row else "" for c in columns))
        for row in rows
    ]
    title = f"H = {rows[0]['hidden']}, share of {copy_gb_s:,.0f} GB/s at T"
    return markdown((title, *columns), cells)


def share(row, column):
    """Of copy bandwidth: the floor is the seam's bytes at that speed."""
    return row["floor"] / row[column]


def by_hidden_size(results):
    sizes = dict.fromkeys(row["hidden"] for row in results["rows"])
    return {size: [row for row in results["rows"] if row["hidden"] == size] for size in sizes}


def timed(rows):
    """The columns that were timed, at any T."""
    return [column for column in COLUMNS if any(column in row for row in rows)]


def markdown(header, rows):
    """A table that also lines up as text, numbers on the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells):
        first, *rest = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        return f"| {' | '.join(padded)} |"

    first, *rest = widths
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in rest)]
    return "\n".join(map(line, (header, rule, *rows)))


def plot(results, path):
    """A PNG: us and percent of copy bandwidth over T, two panels for each H."""
    try:
        import matplotlib
    except ImportError:
        print(f"No matplotlib, no plot. Later: bench_seam.py --plot {path.with_suffix('.json')}")
        return
    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    sizes = by_hidden_size(results)
    figure, panels = pyplot.subplots(len(sizes), 2, figsize=(11, 4.2 * len(sizes)), squeeze=False)
    for (hidden, rows), (times, shares) in zip(sizes.items(), panels, strict=True):
        for column in timed(rows):
            found = [row for row in rows if column in row]
            tokens = [row["tokens"] for row in found]
            style = {"marker": "o", "markersize": 4, "label": column}
            times.plot(tokens, [row[column] for row in found], **style)
            shares.plot(tokens, [100 * share(row, column) for row in found], **style)
        floor = [row["floor"] for row in rows]
        times.plot([row["tokens"] for row in rows], floor, "k--", label="copy of the seam's bytes")
        title = f"{results['environment']['device']}, H = {hidden}"
        times.set(title=title, xlabel="tokens", ylabel="us per seam", xscale="log", yscale="log")
        shares.set(title="% of copy bandwidth", xlabel="tokens", xscale="log", ylim=(0, 100))
        times.legend(fontsize=8)
        for panel in (times, shares):
            panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    print(f"Plot: {path}")
