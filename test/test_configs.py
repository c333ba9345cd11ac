"""Launch tuning is data: every row of every file must be usable, and bad data must not load."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch

from mhc_ops import configs, launch

# `configs.lookup` is the function of that name.
module = importlib.import_module("mhc_ops.configs.lookup")

HIDDEN_SIZES = (128, 256, 384, 640, 4096, 5120, 7168)
KNOWN = ("default", "gfx942", "gfx950", "sm_100", "sm_90")


@pytest.fixture
def named(monkeypatch):
    """Makes the GPU be of another kind."""
    launch.architecture.cache_clear()

    def be(properties, hip=None):
        launch.architecture.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.version, "hip", hip)
        return launch.architecture(0)

    yield be
    launch.architecture.cache_clear()


@pytest.mark.parametrize(
    ("major", "minor", "name"),
    [(8, 0, "sm_80"), (8, 9, "sm_89"), (9, 0, "sm_90"), (10, 0, "sm_100"), (12, 0, "sm_120")],
)
def test_nvidia_names(named, major, minor, name):
    assert named(SimpleNamespace(major=major, minor=minor)) == name


@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx950", "gfx1201"])
@pytest.mark.parametrize("features", ["", ":sramecc+:xnack-"])
def test_amd_names(named, name, features):
    properties = SimpleNamespace(gcnArchName=name + features, major=9, minor=4)
    assert named(properties, hip="7.0") == name


def test_files():
    assert set(configs.architectures()) <= set(KNOWN)
    assert "default" in configs.architectures()


@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize("name", ["sm_75", "sm_89", "sm_120", "gfx90a", "gfx1201", "unheard_of"])
def test_unknown_architectures_get_the_default(name, hidden_size):
    assert name not in configs.architectures()
    assert configs.rows(name, hidden_size) == configs.rows("default", hidden_size)


@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize("name", KNOWN)
def test_every_row_is_reached_at_its_edges(name, hidden_size):
    rows = configs.rows(name, hidden_size)
    first = 0
    for row in rows:
        last = row.max_tokens if row.max_tokens is not None else first + 2**31
        assert first <= last, "a row that no T reaches"
        for tokens in (first, last):
            assert configs.lookup(name, hidden_size, tokens) is row
        first = last + 1
    assert rows[-1].max_tokens is None


@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize("name", KNOWN)
def test_every_row_can_be_launched(name, hidden_size):
    """Grids and block sizes are what the kernels assume."""
    for row in configs.rows(name, hidden_size):
        assert hidden_size % row.block_h == 0
        assert row.cols is None or row.cols % row.block_h == 0
        assert row.warps in (1, 2, 4, 8, 16)
        assert row.row_warps in (1, 2, 4, 8, 16)
        assert row.gate_warps in (1, 2, 4, 8, 16)


ROW = {
    "max_tokens": None, "fused": True, "row_block": 1024, "row_warps": 4, "block_t": 16,
    "block_h": 64, "cols": 128, "warps": 4, "stages": 2, "fence": True, "pack": False, "gate_t": 1,
    "split_block": 4, "gate_warps": 4,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for configuration files in place of the shipped one."""
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    module.rows.cache_clear()

    def write(*rows, hidden_size=None):
        table = [{"hidden_size": hidden_size, "rows": list(rows)}]
        (tmp_path / "default.json").write_text(json.dumps(table))

    yield write
    module.rows.cache_clear()


def row(**changed):
    return {**ROW, **changed}


def test_good_data(folder):
    folder(row(max_tokens=4), row(block_t=32))
    assert [r.block_t for r in configs.rows("sm_90", 256)] == [16, 32]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(block_t=24)], "block_t must be a power of two, got 24"),
        ([row(block_t=8, pack=True)], "block_t 8 is below 16: needs fused, no pack"),
        ([row(block_t=1, fused=False)], "block_t 1 is below 16: needs fused, no pack"),
        ([row(block_t=1, cols=256)], "block_t 1 is below 16: .* cols 32, 64 or 128"),
        ([row(gate_t=0)], "gate_t must be a power of two, got 0"),
        ([row(split_block=3)], "split_block must be a power of two, got 3"),
        ([row(cols=96)], "cols 96 must be a multiple of block_h 64"),
        ([row(max_tokens=4)], "max_tokens must ascend and end with null"),
        ([row(max_tokens=4), row(max_tokens=2), row()], "max_tokens must ascend"),
        ([row(block_h=512, cols=512)], "block_h 512 does not divide H 256"),
    ],
    ids=lambda v: v.split(",")[0].replace(" ", "_") if isinstance(v, str) else "",
)
def test_bad_data(folder, rows, message):
    folder(*rows)
    with pytest.raises(ValueError, match=message):
        configs.rows("sm_90", 256)


def test_misspelt_field(folder):
    folder(row(num_warps=4))
    with pytest.raises(TypeError, match="num_warps"):
        configs.rows("sm_90", 256)
