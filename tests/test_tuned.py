"""Files of measured settings: what they say is used, and what is no such file is left out, with a warning."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import emulated_cuda
import pytest
import torch
from oracle import Layer

from replayssm import ReplayPool, tuned
from replayssm.backends.cuda import blocks, build, cuts, launch
from replayssm.backends.cuda.blocks import Block
from replayssm.tuned import Cut, Ring, Shape, Tuned, TunedFileError, TunedLayer, parse, unparse

GPU = "NVIDIA Test 100"
F32, BF16 = torch.float32, torch.bfloat16
SHAPE = Shape("gdn", 16, 32, 128, 128, "float32", "bfloat16")
RING = Ring(8, "float32", [1, 64], {"8 float32": [4.0, 50.0], "16 bfloat16": [4.5, 49.0]})
LAYER = blocks.Shape(False, True, 128, 128, 2, 32, 16, F32)
SMALLER, OTHER, *_ = blocks.candidates(LAYER, BF16, 227 * 1024)


def cut(batch: int, block: Block | None = SMALLER, us: float = 9.0) -> Cut:
    return Cut(batch, {} if block is None else {name: int(x) for name, x in asdict(block).items()}, us, 10.0)


def file_with(*cuts: Cut, shape: Shape = SHAPE, gpu: str = GPU) -> Tuned:
    return Tuned(gpu, {"torch": "2.11"}, (TunedLayer(shape, RING, cuts),))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the user's own files lie; the package ships none for this GPU, but what a test puts beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shipped = {GPU: tmp_path / "shipped.json"}
    monkeypatch.setattr(tuned.store, "shipped_file", lambda gpu: shipped.get(gpu, tmp_path / "none"))
    tuned.forget()
    yield tmp_path
    tuned.forget()


def test_a_file_is_read_as_it_was_written() -> None:
    whole = file_with(cut(1), cut(64, None))
    assert parse(unparse(whole)) == whole
    assert parse(unparse(Tuned(GPU, {}, ()))) == Tuned(GPU, {}, ())


TEXT = unparse(file_with(cut(1), cut(64)))


def changed(path: str, value: object) -> str:
    """The text with another value somewhere."""
    given = json.loads(TEXT)
    *places, last = [int(place) if place.isdigit() else place for place in path.split(".")]
    entry = given
    for place in places:
        entry = entry[place]
    if value is None:
        del entry[last]
    else:
        entry[last] = value
    return json.dumps(given)


SPOILT = {
    "empty": ("", "it is not JSON"),
    "of another kind": ('{"architectures": ["Qwen3_5"]}', 'its "format" is not'),
    "a list": ("[]", 'its "format" is not'),
    "of another version": (changed("format", "replayssm tuned settings 9"), 'its "format" is not'),
    "deep": ("[" * 100_000, "it is not JSON"),
    "without layers": (changed("layers", None), "layers is missing"),
    "layers of another kind": (changed("layers", {}), "layers is a dict"),
    "a layer of another kind": (changed("layers.0", 3), r"layers\[0\] is a int"),
    "no heads": (changed("layers.0.shape.num_v_heads", 0), r"layers\[0\].shape.num_v_heads is 0"),
    "heads that are no number": (changed("layers.0.shape.num_k_heads", True), r"layers\[0\].shape.num_k_heads is True"),
    "unknown kind": (changed("layers.0.shape.kind", "rwkv"), "kind is 'rwkv', not one of gdn, kda, mamba2"),
    "unknown dtype": (changed("layers.0.shape.state_dtype", "int8"), "state_dtype is 'int8', not one of"),
    "too few times": (changed("layers.0.ring.us", {"8": [1.0]}), r"ring.us\['8'\] is not a time for each of 2 batches"),
    "a time that is none": (changed("layers.0.ring.us", {"8": [1.0, "2"]}), r"ring.us\['8'\] is not a time"),
    "a negative time": (changed("layers.0.cuts.1.us", -1), r"layers\[0\].cuts\[1\] has no times"),
    "a block of texts": (changed("layers.0.cuts.0.block", {"rows": "64"}), r"cuts\[0\].block holds something else"),
    "no batch": (changed("layers.0.cuts.0.batch", None), r"layers\[0\].cuts\[0\].batch is missing"),
    "a shape twice": (changed("layers", json.loads(TEXT)["layers"] * 2), "layers has a shape twice"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_no_such_file_is_refused(name: str) -> None:
    text, message = SPOILT[name]
    with pytest.raises(TunedFileError, match=message):
        parse(text)


def test_a_file_that_is_cut_off_anywhere_is_refused() -> None:
    for end in range(0, len(TEXT.rstrip()), 7):
        with pytest.raises(TunedFileError):
            parse(TEXT[:end])


def test_the_users_own_file_takes_the_place_of_the_shipped_one_layer_by_layer(folder: Path) -> None:
    other = replace(SHAPE, state_dtype="bfloat16")
    shipped = Tuned(GPU, {}, (TunedLayer(SHAPE, RING, ()), TunedLayer(other, RING, ())))
    tuned.save(shipped, folder / "shipped.json")
    tuned.save(file_with(cut(1)), tuned.own_file(GPU))
    mine, theirs = tuned.layer_of(GPU, SHAPE), tuned.layer_of(GPU, other)
    assert mine is not None
    assert theirs is not None
    assert (mine[0].cuts, mine[1]) == ((cut(1),), tuned.own_file(GPU))
    assert theirs[1] == folder / "shipped.json"
    assert tuned.layer_of(GPU, replace(SHAPE, head_v_dim=64)) is None
    assert tuned.layer_of("another GPU", SHAPE) is None


def test_without_a_folder_to_keep_files_in_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned.layer_of(GPU, SHAPE) is None
    with pytest.raises(OSError):  # noqa: PT011
        tuned.save(file_with(cut(1)), tuned.own_file(GPU))


def test_layers_that_are_not_measured_anew_stay_in_a_file() -> None:
    path, other = tuned.own_file(GPU), replace(SHAPE, num_v_heads=16)
    for shape, batch in ((SHAPE, 1), (other, 2), (SHAPE, 4)):
        tuned.save(file_with(cut(batch), shape=shape), path)
    layers = parse(path.read_text()).layers
    assert {layer.shape: layer.cuts for layer in layers} == {SHAPE: (cut(4),), other: (cut(2),)}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TEXT[:-30], "it is not JSON"),
        ("\udcff", "it can't be read"),
        (TEXT.replace(GPU, "NVIDIA B300"), "it is for 'NVIDIA B300', this is 'NVIDIA Test 100'"),
    ],
    ids=["cut off", "no text", "another GPU's"],
)
def test_a_spoilt_file_is_left_out_with_one_warning(text: str, why: str, folder: Path) -> None:
    tuned.save(file_with(cut(1)), folder / "shipped.json")
    path = tuned.own_file(GPU)
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode(errors="surrogateescape"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            found = tuned.layer_of(GPU, SHAPE)
            assert found is not None
            assert found[1] == folder / "shipped.json"
    (said,) = [str(warning.message) for warning in told]
    assert said.startswith(f"{path} is left out, it holds no tuned settings: {why}")


# --- how cuts are used


def cut_of(batch: int, shape: blocks.Shape, gpu: str = GPU) -> Block | None:
    return cuts.cut_of(shape, BF16, batch, gpu, multiprocessors=132, shared_limit=227 * 1024)


def test_a_step_is_cut_as_at_the_batches_around_it_that_were_measured() -> None:
    """Where these differ, and further out, the rule decides."""
    measured = {8: SMALLER, 16: SMALLER, 64: OTHER, 256: None, 512: None}
    tuned.save(file_with(*(cut(batch, block) for batch, block in measured.items())), tuned.own_file(GPU))
    assert [cut_of(batch, LAYER) for batch in (4, 8, 9, 16)] == [SMALLER] * 4
    assert cut_of(64, LAYER) == OTHER
    for batch in (1, 3, 17, 63, 65, 256, 300, 512, 1024, 4096):
        assert cut_of(batch, LAYER) == cut_of(batch, LAYER, gpu="another GPU")
    assert cut_of(8, replace(LAYER, head_v_dim=64)) == cut_of(8, replace(LAYER, head_v_dim=64), gpu="another GPU")


def test_beyond_the_largest_batch_its_cut_holds_for_twice_as_many_rows() -> None:
    tuned.save(file_with(cut(64, OTHER)), tuned.own_file(GPU))
    assert [cut_of(batch, LAYER) for batch in (32, 64, 128)] == [OTHER] * 3
    for batch in (31, 129):
        assert cut_of(batch, LAYER) == cut_of(batch, LAYER, gpu="another GPU")


def test_a_cut_holds_for_rings_of_any_length() -> None:
    """Fewer blocks stay on a multiprocessor beside a longer ring."""
    staying = [block for block in blocks.candidates(LAYER, BF16, 227 * 1024) if block.resident]
    longer = replace(LAYER, ring_rows=64)
    for block in staying:
        tuned.save(file_with(cut(8, block)), tuned.own_file(GPU))
        assert cut_of(8, LAYER) == block
        found = cut_of(8, longer)
        assert found in blocks.candidates(longer, BF16, 227 * 1024)
        assert (found.rows, found.warps) == (block.rows, block.warps)
        assert found.resident <= block.resident
    assert any(cut_of(8, longer) != block for block in staying)


@pytest.mark.parametrize(
    "changes",
    [{"rows": 48}, {"warps": 0}, {"registers": 1}, {"of_other_kernels": 3}, {"rows": None}],
    ids=["divides no head", "no warps", "no registers", "another field", "a field is missing"],
)
def test_a_cut_that_these_kernels_cannot_make_is_not_used(changes: dict[str, int | None]) -> None:
    values = asdict(SMALLER) | changes
    given = Cut(8, {name: int(value) for name, value in values.items() if value is not None}, 1.0, 2.0)
    tuned.save(file_with(given), tuned.own_file(GPU))
    assert cut_of(8, LAYER) == cut_of(8, LAYER, gpu="another GPU")


@pytest.mark.skipif(emulated_cuda.missing() is not None, reason=str(emulated_cuda.missing()))
def test_a_measured_cut_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer("gdn", 1, 2, 64, 32, backend="cuda")
    inputs = [layer.draw(2) for _ in range(4)]
    shape = blocks.Shape(False, True, 32, 64, 2, 2, 3, F32)
    usual = blocks.choose(shape, F32, 128, 1, 227 * 1024)
    assert usual is not None
    measured = next(block for block in blocks.candidates(shape, F32, 227 * 1024) if block.rows < usual.rows)
    outputs, used = [], []
    for block in (usual, measured):
        emulated_cuda.install(monkeypatch)
        about = launch.Properties(1, 227 * 1024, "cpu", GPU)
        monkeypatch.setattr(launch, "properties", lambda device, about=about: about)
        monkeypatch.setattr(launch, "kernel", lambda *args: (used.append(args[1]), emulated_cuda.kernel(*args))[1])
        if block is measured:
            tuned.save(file_with(cut(2, block), shape=cuts.tuned_shape(shape, F32)), tuned.own_file(GPU))
        pool = ReplayPool([layer.spec], 2, ring_len=3, backend="cuda")
        slots = pool.slot_tensor(pool.alloc(2))
        for x in inputs:
            outputs.append(layer.decode(x, **pool.state_args(0), slots=slots))
            pool.advance(slots)
    assert used == [usual, measured]
    assert torch.equal(torch.stack(outputs[:4]), torch.stack(outputs[4:]))


# --- what is said of them


def test_doctor_says_which_file_decides_about_which_layer(folder: Path) -> None:
    from replayssm.cli.doctor import tuned_files

    other = replace(SHAPE, state_dtype="bfloat16")
    layers = (TunedLayer(SHAPE, RING, ()), TunedLayer(other, RING, ()))
    tuned.save(Tuned(GPU, {"date": "2026-11-30"}, layers), folder / "shipped.json")
    tuned.save(replace(file_with(), made_with={"kernels": build.fingerprint({}, "")}), tuned.own_file(GPU))
    shipped, own = tuned_files(GPU)
    assert (shipped.path, shipped.layers) == (str(folder / "shipped.json"), ["gdn k16 v32 128x128 bfloat16: L = 8"])
    assert shipped.note.startswith("measured on 2026-11-30, with other kernels than these")
    assert (own.path, own.layers) == (str(tuned.own_file(GPU)), ["gdn k16 v32 128x128 float32: L = 8"])
    assert "other kernels" not in own.note
    tuned.own_file(GPU).write_text("{}")
    spoilt, shipped = tuned_files(GPU)
    assert 'its "format" is not' in spoilt.note
    assert len(shipped.layers) == 2
    assert tuned_files("another GPU") == []
