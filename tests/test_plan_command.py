"""``fmstream plan``: targets, the numbers of a page, and what is printed and drawn."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fmstream.cli import main
from fmstream.doors.inputs import Size
from fmstream.doors.plan_command import make_page
from fmstream.doors.subjects import find_subject
from fmstream.errors import ConfigError
from fmstream.policies import names
from fmstream.report.plan_page import CardFacts, ModelFacts, PlanPage, Played, Point, render_plan

LAYERS, WIDTH = 10, 1024
WEIGHTS_BYTES = LAYERS * (WIDTH + 1) * WIDTH * 2

MODELS = f"""
import torch
from torch import nn

def layers(num_tokens=64):
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, dtype=torch.bfloat16) for _ in range({LAYERS})))
        return module, {{"input": torch.empty(num_tokens, {WIDTH}, dtype=torch.bfloat16)}}

def busy():
    return layers(1 << 15)

def alone():
    return layers()[0]

def nothing():
    return 3
"""


@pytest.fixture(autouse=True)
def module_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``planned_models.py`` in the current folder."""
    (tmp_path / "planned_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "planned_models", raising=False)


def write(folder: Path, name: str, content: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder


FLUX = {
    "_class_name": "FluxTransformer2DModel",
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "in_channels": 4,
    "axes_dims_rope": [4, 4, 8],
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


# Targets


@pytest.mark.parametrize(
    ("target", "name", "num_parameters"),
    [
        ("wan2.1-i2v-14b", "WanTransformer3DModel", 16.396e9),
        ("svd", "UNetSpatioTemporalConditionModel", 1.5246e9),
        ("flux", "FluxTransformer2DModel", 11.901e9),
        ("sdxl", "UNet2DConditionModel", 2.5675e9),
        ("llama-3-8b", "LlamaForCausalLM", 8.0303e9),
    ],
)
def test_examples_are_the_published_models(target: str, name: str, num_parameters: float) -> None:
    subject = find_subject(target, Size())
    assert type(subject.module).__name__ == name
    assert sum(p.numel() for p in subject.module.parameters()) == pytest.approx(num_parameters, rel=1e-3)
    assert sum(p.numel() for p in subject.module.parameters() if not p.is_meta) < 1000


def test_a_pipeline_folder_gives_its_denoiser(tmp_path: Path) -> None:
    folder = write(tmp_path / "pipe", "model_index.json", {"transformer": ["diffusers", "FluxTransformer2DModel"]})
    write(folder / "transformer", "config.json", FLUX)
    subject = find_subject(str(folder), Size(height=64, width=96, batch=3))
    assert type(subject.module).__name__ == "FluxTransformer2DModel"
    assert subject.step == "one step of FluxTransformer2DModel, 96x64, batch 3"
    assert {p.dtype for p in subject.module.parameters()} == {torch.bfloat16}
    args, kwargs = subject.inputs(torch.device("meta"))
    assert args == ()
    assert kwargs["hidden_states"].shape == (3, 4 * 6, 4)


def test_a_transformers_folder_decodes_one_token(tmp_path: Path) -> None:
    page = make_page(str(write(tmp_path / "llama", "config.json", LLAMA)), "h200", Size(tokens=7))
    assert page.model.step == "one step of LlamaForCausalLM, one token after 7, batch 1"
    assert page.model.dtypes == {"bfloat16": page.model.weights_bytes}


def test_a_function_may_leave_the_inputs_to_us_where_they_are_known() -> None:
    subject = find_subject("planned_models:layers", Size())
    args, kwargs = subject.inputs(torch.device("meta"))
    assert (args, kwargs["input"].shape) == ((), (64, WIDTH))
    with pytest.raises(ConfigError, match="inputs of Sequential are not known"):
        find_subject("planned_models:alone", Size())


@pytest.mark.parametrize(
    ("target", "size", "message"),
    [
        ("fluks", Size(), "bundled example"),
        ("planned_models:none", Size(), "no function 'none'"),
        ("no_such_module_here:f", Size(), "cannot be imported"),
        ("planned_models:nothing", Size(), "returned int"),
        ("planned_models:layers", Size(batch=2), "--batch means nothing"),
        ("empty", Size(), "neither model_index.json nor config.json"),
        ("parts", Size(), "lists none of transformer"),
        ("neither", Size(), "neither a diffusers nor a transformers"),
        ("unknown", Size(), "has no NoSuchModel"),
        ("damaged", Size(), "cannot be built"),
        ("flux", Size(frames=5), "--frames means nothing to FluxTransformer2DModel"),
        ("unsure", Size(), "the nearest known is UNet2DConditionModel"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path: Path, target: str, size: Size, message: str) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "parts", "model_index.json", {"vae": ["diffusers", "AutoencoderKL"]})
    write(tmp_path / "neither", "config.json", {"layers": 3})
    write(tmp_path / "unknown", "config.json", {"_class_name": "NoSuchModel"})
    write(tmp_path / "damaged", "config.json", FLUX | {"num_layers": "many"})
    write(tmp_path / "flux", "config.json", FLUX)
    write(tmp_path / "unsure", "config.json", {"_class_name": "UNet2DModel", "block_out_channels": [32, 32, 32, 32]})
    if target == "flux":
        target = str(tmp_path / target)
    with pytest.raises(ConfigError, match=message):
        find_subject(target, size)


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "flux", "config.json", FLUX)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigError, match="pip install diffusers"):
        find_subject(str(folder), Size())


@pytest.mark.parametrize("size", [{"frames": 0}, {"batch": -1}, {"width": 1 << 30}])
def test_sizes_are_checked(size: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(size))):
        Size(**size)


# Numbers


@pytest.fixture(scope="module")
def page() -> PlanPage:
    """Of layers that the link bounds, with a step that was played."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "planned_here", _module())
        return make_page("planned_here:layers", "rtx4070-laptop", Size(), memory="60%", drawn=True)


def _module() -> Any:
    import types

    made = types.ModuleType("planned_here")
    exec(MODELS, made.__dict__)
    return made


def test_a_page_says_what_the_weights_and_the_card_allow(page: PlanPage) -> None:
    assert page.model.weights_bytes == WEIGHTS_BYTES
    assert page.link_seconds == pytest.approx(WEIGHTS_BYTES / 13e9)
    assert page.regime == "link-bound"
    assert page.policies == names()
    assert 0 < page.activation_bytes < page.card.memory_bytes - page.room_bytes
    assert page.smallest_bytes >= WEIGHTS_BYTES // LAYERS
    last = page.table[-1]
    assert last.memory_bytes == WEIGHTS_BYTES
    assert last.seconds["overlap_async"] == pytest.approx(page.compute_seconds)
    assert all(point.has_room for point in page.table)


def test_more_memory_is_never_slower_and_no_policy_beats_the_bound(page: PlanPage) -> None:
    steps = [point.seconds["overlap_async"] for point in page.curve]
    known = [seconds for seconds in steps if seconds is not None]
    assert steps[0] is None, "one percent of ten layers holds none of them"
    assert all(more <= 1.02 * less for less, more in pairwise(known))
    for point in page.curve:
        assert all(seconds >= 0.999 * point.bound_seconds for seconds in point.seconds.values() if seconds is not None)


def test_the_knee_is_the_least_memory_that_is_as_fast_as_computing(page: PlanPage) -> None:
    at = {point.memory_bytes: point.seconds["overlap_async"] for point in page.curve}
    knee = at[page.knee_bytes]
    assert knee is not None
    assert knee <= 1.0051 * page.compute_seconds
    below = [seconds for memory, seconds in at.items() if memory < 0.9 * page.knee_bytes and seconds is not None]
    assert below
    assert min(below) > 1.0051 * page.compute_seconds
    assert page.auto_bytes == page.knee_bytes, "the card has room for all of it"


def test_the_played_step_is_the_predicted_one(page: PlanPage) -> None:
    (played,) = page.played
    assert played.memory == "60%"
    assert played.weight_bytes <= 0.6 * WEIGHTS_BYTES
    assert played.predicted_seconds == pytest.approx(played.seconds, rel=0.1)


def test_compute_bound_takes_little(tmp_path: Path) -> None:
    page = make_page("planned_models:busy", "rtx4070-laptop", Size(), verify=True)
    assert page.regime == "compute-bound"
    assert page.auto_bytes is not None
    assert page.auto_bytes <= 0.4 * WEIGHTS_BYTES
    (played,) = page.played
    assert played.memory == "auto"
    assert played.seconds <= 1.02 * page.compute_seconds
    assert "Streaming is free here" in render_plan(page)


def test_all_of_the_weights_are_played_as_the_resident_step() -> None:
    page = make_page("planned_models:layers", "h200", Size(), memory="100%")
    assert page.played == (Played("100%", "overlap_async", WEIGHTS_BYTES, page.compute_seconds, page.compute_seconds),)


# The page


def test_the_page_fits_the_width_and_names_what_matters(page: PlanPage) -> None:
    text = render_plan(page)
    assert max(map(len, text.splitlines())) <= 100
    for part in (
        "Sequential",
        "uncalibrated",
        "C/S",
        "knee",
        "activations",
        "60%",
        "too little",
        "weights are unknown",
    ):
        assert part in text
    assert all(name in text for name in names())


def test_the_page_as_json(page: PlanPage) -> None:
    found = json.loads(page.to_json())
    assert found["schema"] == 1
    assert found["regime"] == "link-bound"
    assert found["table"][-1]["seconds"]["sync"] == page.table[-1].seconds["sync"]


def made(**changes: Any) -> PlanPage:
    card = CardFacts("card", "A card", 8 << 30, 13e9, 256e9, 40e12, 30e12)
    model = ModelFacts("model", "Model", "one step", 10**9, 2 << 30, {"bfloat16": 2 << 30})
    point = Point(1 << 30, 0.5, 1.0, {"overlap_async": 1.0}, True)
    whole = PlanPage(model, card, 1.0, 0.2, 1 << 30, 7 << 30, 1 << 20, 1 << 28, 1 << 28, 1.0, (point,), (point,))
    return replace(whole, **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"room_bytes": 0, "auto_bytes": None, "auto_seconds": None}, "does not run at this size"),
        ({"auto_bytes": None, "auto_seconds": None, "room_bytes": 5}, "the least that works"),
        ({}, "All weights fit beside the activations"),
        ({"room_bytes": 1 << 30}, "Streaming is free here"),
        ({"room_bytes": 1 << 30, "auto_seconds": 2.5}, "2.50 times as long as computing alone"),
    ],
)
def test_sentences_say_what_follows(changes: dict[str, Any], sentence: str) -> None:
    assert sentence in " ".join(made(**changes).sentences())


@pytest.mark.parametrize("room_bytes", [0, 1 << 29, 7 << 30])
def test_the_picture_is_a_png(tmp_path: Path, page: PlanPage, room_bytes: int) -> None:
    pytest.importorskip("matplotlib")
    from fmstream.report.plan_plot import save_plan_png

    save_plan_png(replace(page, room_bytes=room_bytes), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG\r\n")


# The command


def test_the_command_prints_the_page_and_saves_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "made" / "here"
    assert main(["plan", "planned_models:layers", "--gpu", "h200", "--out", str(out)]) == 0
    assert "Sequential" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"plan.json", "plan.png"}
    assert json.loads((out / "plan.json").read_text())["card"]["key"] == "h200"


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "planned_models:layers", "--gpu", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["weights_bytes"] == WEIGHTS_BYTES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flux", "--gpu", "rtx4070"], "did you mean 'rtx4070-laptop'"),
        (["planned_models:layers", "--gpu", "h200", "--memory", "1%"], "smallest that works"),
        (["planned_models:layers", "--gpu", "h200", "--memory", "much"], "is no size"),
        (["planned_models:layers", "--gpu", "h200", "--tokens", "0"], "--tokens 0"),
    ],
)
def test_errors_are_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
