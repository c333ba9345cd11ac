"""The benchmarks' tables and plot, from made-up numbers."""

import json
import sys

import bench_seam
import expecttest
import pytest
import report

RESULTS = {
    "environment": {"device": "a GPU"},
    "copy_gb_s": 4000.0,
    "rows": [
        {"hidden": 256, "tokens": 1, "floor": 0.5, "eager": 1234.5, "unfused": 20.0, "best": 10.0},
        {"hidden": 256, "tokens": 4096, "floor": 100.0, "unfused": 300.0, "best": 125.0},
        {"hidden": 512, "tokens": 1, "floor": 1.0, "best": 10.0},
    ],
    "per_kernel": [
        {
            "hidden": 256,
            "tokens": 4096,
            "unfused": [["post", 200.0], ["add_rmsnorm", 130.0]],
            "unfused together": 300.0,
            "best": [["seam", 110.0]],
            "best together": 125.0,
        }
    ],
}


def test_tables():
    expecttest.assert_expected_inline(
        report.tables(RESULTS),
        """\
| H = 256, T = 4,096                |    us |
| --------------------------------- | ----: |
| unfused: post                     | 200.0 |
| unfused: add_rmsnorm              | 130.0 |
| unfused: sum of these, each alone | 330.0 |
| unfused: one after the other      | 300.0 |
| best: seam                        | 110.0 |
| best: sum of these, each alone    | 110.0 |
| best: one after the other         | 125.0 |
| speedup, each alone               | 3.00x |
| speedup, one after the other      | 2.40x |

| H = 256, us at T |   eager | unfused |  best | floor |
| ---------------- | ------: | ------: | ----: | ----: |
| 1                | 1,234.5 |    20.0 |  10.0 |   0.5 |
| 4,096            |         |   300.0 | 125.0 | 100.0 |

| H = 256, share of 4,000 GB/s at T | eager | unfused | best |
| --------------------------------- | ----: | ------: | ---: |
| 1                                 |    0% |      2% |   5% |
| 4,096                             |       |     33% |  80% |

| H = 512, us at T | best | floor |
| ---------------- | ---: | ----: |
| 1                | 10.0 |   1.0 |

| H = 512, share of 4,000 GB/s at T | best |
| --------------------------------- | ---: |
| 1                                 |  10% |""",
    )


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report.plot(RESULTS, tmp_path / "seam.png")
    assert (tmp_path / "seam.png").read_bytes()[1:4] == b"PNG"
    assert "seam.png" in capsys.readouterr().out


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report.plot(RESULTS, tmp_path / "seam.png")
    assert "No matplotlib" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_saved_results_show_without_a_gpu(tmp_path, capsys, monkeypatch):
    saved = tmp_path / "seam.json"
    saved.write_text(json.dumps(RESULTS))
    monkeypatch.setattr(sys, "argv", ["bench_seam.py", "--plot", str(saved)])
    bench_seam.main()
    assert report.tables(RESULTS) in capsys.readouterr().out
