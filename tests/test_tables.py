"""Embedding tables on the CPU: read where they lie, in RAM or in a mapped file, and never loaded as a whole."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fmstream
from fmstream import StreamConfig
from fmstream.doors.flash import options_of
from fmstream.errors import ConfigError
from fmstream.payloads import embeddings
from tests.kit import agree, mlp, same, streamed, streamed_bytes, weights_bytes
from tests.kit_runtime import map_weights

WIDTH = 64


@pytest.fixture(autouse=True)
def tiny_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables count as large."""
    monkeypatch.setattr(embeddings, "MIN_TABLE_BYTES", 1)


class Tied(nn.Module):
    """A vocabulary that is also the head, and a table that is only read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words, self.hints = nn.Embedding(300, WIDTH), nn.Embedding(3000, WIDTH, padding_idx=0)
        self.layers = mlp(6, WIDTH)
        self.head = nn.Linear(WIDTH, 300, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.words(ids) + self.hints(ids * 9)))  # type: ignore[no-any-return]


def ids_of(number: int) -> Tensor:
    """Other ids for each number."""
    return torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.6])
def test_outputs_equal_and_the_table_is_not_loaded(fraction: float, in_file: bool, tmp_path: Path) -> None:
    module = Tied().eval()
    twin = copy.deepcopy(module)
    if in_file:
        map_weights(module.hints, tmp_path / "hints.safetensors")
        map_weights(module.layers, tmp_path / "layers.safetensors")
    table_bytes = 3000 * WIDTH * 4
    memory = fmstream.smallest_memory(module) + int(fraction * (weights_bytes(module) - table_bytes) * 0.5)
    assert memory < table_bytes
    with streamed(module, memory=memory, idle=True) as handle:
        for number in range(5):
            agree(module, twin, ids_of(number))
        telemetry = handle.telemetry
        assert telemetry.table_bytes == table_bytes
        assert telemetry.num_lookups >= 5
        assert not telemetry.faults
        assert streamed_bytes(handle) < 5 * table_bytes / 2


def test_a_spilled_table_is_read_from_the_spill_file(tmp_path: Path) -> None:
    module = Tied().eval()
    twin = copy.deepcopy(module)
    with streamed(module, memory=fmstream.smallest_memory(module), spill_dir=tmp_path, edited=True):
        agree(module, twin, ids_of(0), times=4)
    same(module.hints.weight, twin.hints.weight)


def test_bad_ids_raise_what_the_table_would() -> None:
    module = Tied().eval()
    with torch.no_grad(), streamed(module, memory=fmstream.smallest_memory(module)):
        module(ids_of(0))
        with pytest.raises(IndexError):
            module(torch.tensor([[301]]))
        with pytest.raises(IndexError):
            module.hints(torch.tensor([-1]))
        module(ids_of(1))


def test_gradients_of_a_table_are_those_of_the_twin() -> None:
    module = Tied()
    twin = copy.deepcopy(module)
    with streamed(module, memory=fmstream.smallest_memory(module)) as handle:
        for number in range(3):
            for part in (module, twin):
                part(ids_of(number)).square().mean().backward()
        assert any("needs a gradient" in note for note in handle.telemetry.notes)
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_windows_on_the_host() -> None:
    table, ids = nn.Embedding(3000, WIDTH), torch.arange(2999, 0, -7)
    with torch.no_grad():
        found = torch.cat(list(fmstream.stage(table, ids, window=200, device="cpu")))
        assert torch.equal(found, table(ids))


# The options that come with a model

FLASH = {"prefetch_window": 128, "prefetch_strategy": "overlap_async", "cpu_offload_threshold_mb": 1024}


def test_flash_memory_config(tmp_path: Path) -> None:
    expected = StreamConfig(prefetch_window=128, policy="overlap_async", cpu_offload_threshold_mb=1024)
    assert StreamConfig.from_flash_memory_config(FLASH) == expected
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "flash_memory_config": FLASH}))
    assert StreamConfig.from_flash_memory_config(path) == expected
    assert StreamConfig.from_flash_memory_config({}) == StreamConfig()
    assert expected.floor_bytes == 1 << 30


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"prefetch_windows": 1},
            r"unknown option 'prefetch_windows' in flash_memory_config: did you mean 'prefetch_window'",
        ),
        ({"strategy": "sync"}, r"unknown option 'strategy'.*'prefetch_strategy'"),
        ({"policy": "sync"}, r"unknown option 'policy'.*known are prefetch_window, prefetch_strategy"),
        ({"prefetch_window": 0}, r"prefetch_window=0 stages nothing"),
        ({"cpu_offload_threshold_mb": -1}, r"cpu_offload_threshold_mb=-1 is no number of mebibytes"),
        ({"cpu_offload_threshold_mb": 1.5}, r"cpu_offload_threshold_mb=1\.5 is no number"),
    ],
)
def test_what_a_flash_memory_config_cannot_say(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamConfig.from_flash_memory_config(content)


def test_files_without_a_flash_memory_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        StreamConfig.from_flash_memory_config(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="is no JSON file"):
        StreamConfig.from_flash_memory_config(path)
    path.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="has no object flash_memory_config"):
        StreamConfig.from_flash_memory_config(path)
    path.write_text('{"flash_memory_config": 3}')
    with pytest.raises(ConfigError, match="=3 is no object"):
        StreamConfig.from_flash_memory_config(path)
    for odd in (None, 3, [], True):
        with pytest.raises(ConfigError, match=r"is no object: write its keys"):
            StreamConfig.from_flash_memory_config(odd)  # type: ignore[arg-type]


class Configured(nn.Module):
    """A module with a configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.layers = mlp(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def test_a_model_brings_options_that_the_caller_may_overrule() -> None:
    module = Configured({"flash_memory_config": {"prefetch_strategy": "sync", "prefetch_window": 3}})
    for given, policy, window in (
        ({}, "sync", 3),
        ({"policy": "one_ahead"}, "one_ahead", 3),
        ({"config": {"prefetch_window": 5}}, "sync", 5),
        ({"config": StreamConfig()}, "overlap_async", "auto"),
    ):
        with fmstream.stream(module, memory="60%", **given) as handle:  # type: ignore[arg-type]
            assert handle._config.policy == policy
            assert handle._config.prefetch_window == window
    report = fmstream.run(module, torch.ones(1, WIDTH), memory="60%").report
    assert report.policy == "sync"


@pytest.mark.parametrize("odd", ["text", 3, [], True, {"flash_memory_config": {}}])
def test_what_a_model_has_in_place_of_an_object(odd: Any) -> None:
    module = Configured({"flash_memory_config": odd})
    with pytest.raises(ConfigError, match=r"is no object|unknown option 'flash_memory_config'"):
        fmstream.stream(module, memory="60%")


@pytest.mark.parametrize(
    "content",
    [
        b'{"note": "see flash_memory_config"}',
        b'{"text_config": {"flash_memory_config": {"prefetch_window": 3}}}',
        b'{"flash_memory_config": null}',
        b'["flash_memory_config"]',
        b'\xff\xfe{"flash_memory_config": {}}',
    ],
)
def test_a_file_beside_a_model_that_says_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    module = Configured({"_name_or_path": str(tmp_path)})
    assert options_of(module, {"": module}) == {}


def test_names_of_models_that_are_no_paths(tmp_path: Path) -> None:
    for name in ("x" * 5000, "a\0b", "\udcff", str(tmp_path)):
        module = Configured({"_name_or_path": name})
        assert options_of(module, {"": module}) == {}
    (tmp_path / "config.json").write_text('{"flash_memory_config": {"prefetch_window": 3')
    with pytest.raises(ConfigError, match=r"config\.json' is no JSON file"):
        options_of(module, {"": module})


def test_models_of_a_pipeline_must_agree() -> None:
    one, two = ({"flash_memory_config": {"prefetch_window": number}} for number in (1, 2))
    parts: dict[str, nn.Module] = {"a": Configured(one), "b": Configured(one), "c": Configured({})}
    assert options_of(parts, parts) == {"prefetch_window": 1}
    parts["c"] = Configured(two)
    with pytest.raises(ConfigError, match="a and b and c come with a flash_memory_config each"):
        options_of(parts, parts)


def test_a_transformers_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    transformers.LlamaModel(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"flash_memory_config": FLASH}))
    model = transformers.LlamaModel.from_pretrained(tmp_path)
    assert options_of(model, {"": model})["prefetch_window"] == 128


def test_a_diffusers_model(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"flash_memory_config": FLASH}))
    model = diffusers.AutoencoderKL.from_pretrained(tmp_path)
    assert options_of(model, {"": model})["cpu_offload_threshold_mb"] == 1024
