"""Checkpoints: mapped without a copy, fitted to modules, and refused where they do not fit."""

from __future__ import annotations

import gc
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fmstream.device.checkpoint import open_checkpoint
from fmstream.device.homes import Mappings, dirty
from fmstream.errors import CheckpointError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.rnn = nn.LSTM(16, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(self.norm(self.a(x)))[0] * self.table


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.body = nn.Linear(4, 4)


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Tied()


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def save(module: nn.Module, path: Path, **more: torch.Tensor) -> Path:
    tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    tensors.pop("head.weight", None)
    save_file({**tensors, **more}, path)
    return path


def write_raw(path: Path, table: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.arange(96, dtype=torch.uint8).reshape(2, 48) % 2
    tensor = raw.view(dtype)
    save_file({"x": tensor, "b": torch.ones(3, dtype=torch.uint8)}, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert sorted(checkpoint.names()) == ["b", "x"]
    found = checkpoint.tensor("x")
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.view(torch.uint8), raw)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    save_file({"scalar": torch.tensor(2.5), "none": torch.zeros(0, 3)}, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert checkpoint.tensor("scalar").item() == 2.5
    assert checkpoint.tensor("none").shape == (0, 3)
    save_file({"none": torch.zeros(0)}, tmp_path / "none.safetensors")
    assert open_checkpoint(tmp_path / "none.safetensors").tensor("none").numel() == 0
    with pytest.raises(CheckpointError, match="no tensor 'other'"):
        checkpoint.tensor("other")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tensors_are_mapped_and_take_no_memory_until_touched(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"pad": torch.ones(3), "x": torch.ones(1 << 23)}, path)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    checkpoint = open_checkpoint(path)
    before = resident()
    tensor = checkpoint.tensor("x")
    assert resident() - before < 4 << 20
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    place = Mappings.snapshot().find(address, nbytes)
    assert place is not None
    assert place[0] == str(path)
    assert path.read_bytes()[place[1] :] == tensor.numpy().tobytes()
    assert not dirty(address, nbytes)
    assert tensor.untyped_storage().nbytes() == nbytes
    tensor[5] = 2.0
    assert dirty(address, nbytes)
    assert open_checkpoint(path).tensor("x")[5] == 1.0
    del tensor, checkpoint
    gc.collect()
    assert Mappings.snapshot().find(address, nbytes) is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse files and strict accounting")
def test_a_file_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    nbytes = 1 << 42
    path = write_raw(tmp_path / "x.safetensors", {"x": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    try:
        os.truncate(path, path.stat().st_size + nbytes)
    except OSError as error:
        pytest.skip(f"the file system takes no file of 4 TiB: {error}")
    tensor = open_checkpoint(path).tensor("x")
    assert tensor[nbytes - 1] == 0
    tensor[nbytes // 2] = 1
    assert tensor[nbytes // 2] == 1


def test_a_module_on_meta_computes_as_the_saved_one(tmp_path: Path) -> None:
    saved = Block().eval()
    path = save(saved, tmp_path / "x.safetensors")
    module = on_meta(Block)
    module.table = torch.arange(4.0)
    module.a.weight.requires_grad_(False)
    module.a.bias.mark = "kept"
    assert open_checkpoint(path).load_into(module) == []
    module.eval()
    x = torch.ones(3, 8)
    torch.testing.assert_close(module(x), saved(x))
    assert not module.a.weight.requires_grad
    assert module.a.bias.requires_grad
    assert module.a.bias.mark == "kept"
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert not isinstance(module.norm.running_mean, nn.Parameter)
    assert torch.equal(module.norm.num_batches_tracked, saved.norm.num_batches_tracked)


def test_a_real_module_gives_up_its_own_values(tmp_path: Path) -> None:
    saved, module = Block(), Block()
    open_checkpoint(save(saved, tmp_path / "x.safetensors")).load_into(module)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor)


def test_the_files_dtype_wins_unless_one_is_given(tmp_path: Path) -> None:
    path = save(Tied().to(torch.bfloat16), tmp_path / "x.safetensors", **{"body.bias": torch.ones(4)})
    module = on_meta(Tied)
    assert open_checkpoint(path).load_into(module) == []
    assert module.body.weight.dtype == torch.bfloat16
    assert module.body.bias.dtype == torch.float32
    assert open_checkpoint(path).load_into(module, dtype=torch.bfloat16) == ["body.bias"]
    assert module.body.bias.dtype == torch.bfloat16


def test_ties_stay_ties_whichever_name_is_in_the_file(tmp_path: Path) -> None:
    saved = Tied()
    path = save(saved, tmp_path / "x.safetensors")
    module = on_meta(Tied)
    open_checkpoint(path).load_into(module)
    assert module.head.weight is module.embed.weight
    assert torch.equal(module.embed.weight, saved.embed.weight)

    module = on_meta(Tied)
    open_checkpoint(path).load_into(module, rename=lambda name: "head.weight" if name == "embed.weight" else name)
    assert module.head.weight is module.embed.weight
    assert torch.equal(module.embed.weight, saved.embed.weight)

    save_file({name: tensor.clone() for name, tensor in saved.state_dict().items()}, path)
    module = on_meta(Tied)
    open_checkpoint(path).load_into(module)
    assert module.head.weight is module.embed.weight


def test_a_module_under_two_names(tmp_path: Path) -> None:
    saved = nn.Linear(3, 3)
    save_file({"0.weight": saved.weight, "0.bias": saved.bias}, tmp_path / "x.safetensors")
    shared = on_meta(lambda: nn.Linear(3, 3))
    module = nn.Sequential(shared, shared)
    open_checkpoint(tmp_path / "x.safetensors").load_into(module)
    assert torch.equal(module[1].weight, saved.weight)


@pytest.mark.parametrize(("make_saved", "make"), [(Wrapper, Tied), (Tied, Wrapper)])
def test_a_prefix_that_one_side_lacks_is_bridged(make_saved: Any, make: Any, tmp_path: Path) -> None:
    saved, module = make_saved(), on_meta(make)
    tensors = {name: tensor.clone() for name, tensor in saved.state_dict().items() if "head" not in name}
    save_file(tensors, tmp_path / "x.safetensors")
    open_checkpoint(tmp_path / "x.safetensors").load_into(module)
    inner, inner_saved = (model.model if isinstance(model, Wrapper) else model for model in (module, saved))
    assert torch.equal(inner.body.weight, inner_saved.body.weight)
    assert inner.head.weight is inner.embed.weight


def test_old_names_that_a_module_knows_are_taken(tmp_path: Path) -> None:
    saved = Tied()
    tensors = saved.state_dict()
    tensors["body.kernel"] = tensors.pop("body.weight")
    del tensors["head.weight"]
    save_file(tensors, tmp_path / "x.safetensors")
    module = on_meta(Tied)

    def take_old_name(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "kernel")

    module.body.register_load_state_dict_pre_hook(take_old_name)
    open_checkpoint(tmp_path / "x.safetensors").load_into(module)
    assert torch.equal(module.body.weight, saved.body.weight)


def test_missing_and_unexpected_names(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in Tied().state_dict().items() if name != "head.weight"}
    path = tmp_path / "x.safetensors"
    save_file({**tensors, "other.a": torch.ones(1), "other.b": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"2 tensors \(other\.a, other\.b\).*strict=False"):
        open_checkpoint(path).load_into(on_meta(Tied))
    module = on_meta(Tied)
    open_checkpoint(path).load_into(module, strict=False)
    assert torch.equal(module.body.weight, tensors["body.weight"])

    del tensors["body.bias"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors \(body\.bias\) of Tied.*rename="):
        open_checkpoint(path).load_into(on_meta(Tied))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors \(body\.bias\).*without values"):
        open_checkpoint(path).load_into(on_meta(Tied), strict=False)
    module = Tied()
    bias = module.body.bias
    open_checkpoint(path).load_into(module, strict=False)
    assert module.body.bias is bias


def test_many_names_are_cut_short(tmp_path: Path) -> None:
    save_file({f"x{i}": torch.ones(1) for i in range(9)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"9 tensors \(x0, x1, x2, x3, \.\.\.\)"):
        open_checkpoint(tmp_path / "x.safetensors").load_into(nn.Module())


def test_shapes_that_differ(tmp_path: Path) -> None:
    path = save(Tied(), tmp_path / "x.safetensors", **{"body.weight": torch.ones(4, 5), "body.bias": torch.ones(5)})
    with pytest.raises(CheckpointError, match=r"2 shapes differ: body\.\w+ is \(.*\) in the checkpoint.*configuration"):
        open_checkpoint(path).load_into(on_meta(Tied))


def test_a_buffer_that_no_checkpoint_holds_must_be_real(tmp_path: Path) -> None:
    path = save(Block(), tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors \(table\) of Block.*builds them for real"):
        open_checkpoint(path).load_into(on_meta(Block))


def test_rename_that_joins_two_names_is_refused(tmp_path: Path) -> None:
    path = save(Tied(), tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="'same' to more than one"):
        open_checkpoint(path).load_into(on_meta(Tied), rename=lambda name: "same")


# What there is to open


def shard(folder: Path, stem: str = "model", variant: str = "") -> None:
    parts = [{"a": torch.tensor(1.0), "b": torch.tensor(2.0)}, {"c": torch.tensor(3.0)}]
    places = {}
    for number, part in enumerate(parts, 1):
        name = f"{stem}-{number:05}-of-00002.safetensors"
        save_file(part, folder / name)
        places.update(dict.fromkeys(part, name))
    index = folder / f"{stem}.safetensors.index{variant}.json"
    index.write_text(json.dumps({"metadata": {"total_size": 12}, "weight_map": places}))


@pytest.mark.parametrize("given", ["folder", "index"])
@pytest.mark.parametrize(("stem", "variant"), [("model", ""), ("diffusion_pytorch_model", ".fp16"), ("own", "")])
def test_shards_with_their_index(given: str, stem: str, variant: str, tmp_path: Path) -> None:
    shard(tmp_path, stem, variant)
    path = tmp_path if given == "folder" else tmp_path / f"{stem}.safetensors.index{variant}.json"
    checkpoint = open_checkpoint(path)
    assert sorted(checkpoint.names()) == ["a", "b", "c"]
    assert [checkpoint.tensor(name).item() for name in "abc"] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["own"], "own"),
        (["model.fp16"], "model.fp16"),
        (["model", "model.fp16", "adapter"], "model"),
        (["diffusion_pytorch_model", "diffusion_pytorch_model.fp16"], "diffusion_pytorch_model"),
    ],
)
def test_the_file_in_a_folder(names: list[str], chosen: str, tmp_path: Path) -> None:
    for name in names:
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    assert open_checkpoint(tmp_path).names() == [chosen]


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "blobs" / "0123")
    try:
        (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "0123")
    except OSError:
        pytest.skip("no symbolic links here")
    assert torch.equal(open_checkpoint(tmp_path).tensor("x"), torch.ones(2))


def test_nothing_or_too_much_to_open(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file.*safe_serialization"):
        open_checkpoint(tmp_path)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="whole pipeline"):
        open_checkpoint(tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(CheckpointError, match="neither"):
        open_checkpoint(tmp_path / "weights.bin")
    for name in "ab":
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"2 checkpoints \(a\.safetensors, b\.safetensors\)"):
        open_checkpoint(tmp_path)


def test_shards_without_an_index(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="without their index"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not an index"),
        ("[]", "not an index"),
        ('{"weight_map": 3}', "not an index"),
        ('{"weight_map": {"a": "model-00009-of-00002.safetensors"}}', "cannot be read: No such file"),
        ('{"weight_map": {"d": "model-00001-of-00002.safetensors"}}', "lacks 1 tensors .* such as 'd'"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "beside their index"),
    ],
)
def test_damaged_indices(text: str, message: str, tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def one(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"not json", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([1], "not a table"),
        ({"x": 3}, "describes 'x' as 3"),
        (one(dtype="F99"), "'F99'; known are BOOL"),
        (one(dtype=["F32"]), "known are"),
        (one(shape=3), "describes 'x'"),
        (one(shape=[-2]), "describes 'x'"),
        (one(data_offsets=[8, 0]), "-8 bytes"),
        (one(data_offsets=[0, 8, 9]), "describes 'x'"),
        (one(shape=[3]), "gives 'x' 8 bytes for F32 of shape"),
        (one(shape=[3], data_offsets=[0, 12]), "cut short: .* listed, .* are there"),
    ],
)
def test_damaged_headers(table: Any, message: str, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", table, bytes(8))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("size", [0, 5, 8, 20])
def test_files_cut_in_the_header(size: int, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", one(), bytes(8))
    os.truncate(path, size)
    with pytest.raises(CheckpointError, match=r"x\.safetensors.*(header|cut short)"):
        open_checkpoint(path)


def test_a_length_that_is_no_length(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", one(), bytes(8), length=1 << 60)
    with pytest.raises(CheckpointError, match="header of at most 100000000 bytes"):
        open_checkpoint(path)


def test_a_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", one(), bytes(8))
    checkpoint = open_checkpoint(path)
    write_raw(path, one(), bytes(80))
    with pytest.raises(CheckpointError, match="changed while it was open"):
        checkpoint.tensor("x")
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be mapped: No such file"):
        checkpoint.tensor("x")
