"""What modules answer while they stream to a device, and that copies of them hold true values."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.accelerator.cases import WIDTH, Counting, Tied, call
from tests.accelerator.kit import equal, fresh, here, on_host, streaming, twin_on
from tests.clients.pipelines import stable_diffusion
from tests.kit import mlp, noise
from tests.kit_runtime import map_weights
from tests.test_replaced_data import Own
from tests.test_ties import Tying

EMU = "emu:0"


@pytest.fixture(autouse=True)
def eager() -> None:
    """A machine of its own."""
    fresh()


def llama() -> transformers.LlamaForCausalLM:
    """Two tiny layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_every_tensor_of_a_streamed_module_is_on_the_device() -> None:
    module = Counting()
    with torch.no_grad(), streaming(module):
        for number in range(3):
            assert {str(p.device) for p in module.parameters()} == {EMU}
            assert {str(b.device) for b in module.buffers()} == {EMU}
            assert str(module.layers[0].weight.device) == EMU
            assert next(module.parameters()).device == torch.device(EMU)
            call(module, number)


def test_a_transformers_model_generates_as_its_twin() -> None:
    module = llama()
    twin = twin_on(module)
    ids = torch.arange(1, 7, device=here.name)[None]
    expected = twin.generate(ids, max_new_tokens=4, do_sample=False)
    with streaming(module, keeps=True):
        assert str(module.device) == EMU
        found = module.generate(ids, max_new_tokens=4, do_sample=False)
    equal(on_host(found), on_host(expected))


def test_a_diffusers_pipeline_executes_on_the_device() -> None:
    torch.manual_seed(0)
    built = stable_diffusion()
    pipe: Any = built.modules
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    torch.manual_seed(0)
    twin = stable_diffusion()
    for part in twin.modules.components.values():
        if isinstance(part, nn.Module):
            part.to(here.name)
    with torch.no_grad():
        expected = twin.call()
        with streaming(parts, keeps=True):
            assert str(pipe.device) == EMU
            assert str(pipe._execution_device) == EMU
            found = [built.call() for _ in range(2)]
        for output in found:
            equal(on_host(output), on_host(expected))
    assert pipe.device.type == "cpu"


def test_a_state_dict_that_is_saved_holds_true_values(tmp_path: Path) -> None:
    module = Counting()
    twin = twin_on(module)
    with torch.no_grad(), streaming(module):
        for number in range(3):
            call(module, number)
            call(twin, number)
        buffer = io.BytesIO()
        torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, map_location="cpu")
    expected = {name: value.cpu() for name, value in twin.state_dict().items()}
    assert list(loaded) == list(expected)
    equal(list(loaded.values()), list(expected.values()))


def test_a_state_dict_taken_in_a_forward_stays_true() -> None:
    module = mlp(6, WIDTH)
    reference = copy.deepcopy(module.state_dict())
    taken: list[dict[str, torch.Tensor]] = []
    module[6].register_forward_hook(lambda *_: taken.append(module.state_dict()))
    with torch.no_grad(), streaming(module):
        for number in range(4):
            call(module, number)
        for state in taken:
            equal(on_host(list(state.values())), list(reference.values()))
        del state
        taken.clear()


def test_a_model_is_saved_while_it_streams(tmp_path: Path) -> None:
    module = llama()
    ids = torch.arange(1, 7)[None]
    with torch.no_grad():
        expected = module(ids).logits
        with streaming(module):
            module(ids.to(here.name))
            module.save_pretrained(tmp_path)
            module(ids.to(here.name))
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        equal([again(ids).logits], [expected])


@pytest.mark.parametrize("build", [lambda: mlp(6, WIDTH), Tied, Counting])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_is_whole_and_does_not_stream(build: Any, how: Any) -> None:
    module = build()
    reference = copy.deepcopy(module.state_dict())
    with torch.no_grad(), streaming(module, idle=True):
        copied = how(module)
    for param in copied.parameters():
        assert type(param) is nn.Parameter
        assert param.device.type == "cpu"
    equal([value.cpu() for value in copied.state_dict().values()], list(reference.values()))


def test_values_that_are_loaded_reach_masters_and_device() -> None:
    module, other = mlp(6, WIDTH, 0), mlp(6, WIDTH, 1)
    twin = twin_on(other)
    with torch.no_grad(), streaming(module):
        for number in range(3):
            call(module, number)
        module.load_state_dict(other.state_dict())
        for number in range(3):
            equal(on_host(call(module, number)), on_host(call(twin, number)))
    equal(list(module.state_dict().values()), list(other.state_dict().values()))


def test_reads_outside_a_forward_give_true_values_on_the_device() -> None:
    module = mlp(6, WIDTH)
    reference = module[4].weight.detach().clone()
    with torch.no_grad(), streaming(module) as handle:
        call(module, 0)
        value = module[4].weight * 1
        assert str(value.device) == EMU
        equal(on_host(value), [reference])
        equal(on_host(module[4].weight[2]), [reference[2]])
        assert handle.telemetry.faults
        del value


@pytest.mark.parametrize("how", ["parameter", "data"])
def test_a_parameter_that_was_made_on_the_device_is_taken(how: str) -> None:
    module = mlp(6, WIDTH)
    twin = twin_on(module)
    with torch.no_grad(), streaming(module, edited=True, keeps=True):
        call(module, 0)
        value = torch.full((WIDTH, WIDTH), 0.01, device=module[4].weight.device)
        for part in (module, twin):
            if how == "parameter":
                part[4].weight = nn.Parameter(value.clone())
            else:
                part[4].weight.data = value.clone()
        for number in range(3):
            equal(on_host(call(module, number)), on_host(call(twin, number)))
    assert module[4].weight.device.type == "cpu"


@pytest.mark.parametrize("in_call", [0, 2])
@pytest.mark.parametrize("width", [WIDTH, 2 * WIDTH, WIDTH // 4])
def test_data_replaced_in_the_midst_of_a_pass(width: int, in_call: int) -> None:
    module = mlp(6, WIDTH)
    twin = twin_on(module)
    call_number = 0

    def replace(layers: nn.Sequential) -> None:
        for index, shape in ((8, (width, WIDTH)), (10, (WIDTH, width))):
            weight = layers[index].weight
            weight.data = noise(*shape, seed=index).to(weight.device) / 8
            weight.mul_(0.5)
        layers[8].bias.data = noise(width, seed=9).to(layers[8].bias.device)

    for part in (module, twin):
        part[2].register_forward_pre_hook(lambda *_, part=part: replace(part) if call_number == in_call else None)
    with torch.no_grad(), streaming(module, edited=True, keeps=True):
        for call_number in range(4):
            equal(on_host(call(module, call_number)), on_host(call(twin, call_number)))
    assert module[8].weight.shape == (width, WIDTH)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("in_file", [False, True])
def test_parameter_objects_taken_before_opening_and_changed(kept: bool, in_file: bool, tmp_path: Path) -> None:
    module = mlp(6, WIDTH)
    if in_file:
        map_weights(module, tmp_path / "weights.safetensors")
    twin = twin_on(module)
    taken = [[part[4].weight, part[8].weight, part[8].bias, part[10].weight] for part in (module, twin)]
    with torch.no_grad(), streaming(module, edited=True, keeps=True):
        for number in range(6):
            equal(on_host(call(module, number)), on_host(call(twin, number)))
            for turned, weight, bias, following in taken if number == 2 else ():
                turned.data = turned.data.t()
                weight.data, bias.data = weight.data[: WIDTH // 2], bias.data[: WIDTH // 2]
                following.data = following.data[:, : WIDTH // 2]
            if not kept and number == 2:
                taken.clear()
    equal(on_host(list(module.state_dict().values())), on_host(list(twin.state_dict().values())))


def _cut(own: Own) -> None:
    device = own.weight.device
    own.weight.set_(noise(8, WIDTH, seed=1).to(device))
    own.bias.set_(noise(8, seed=2).to(device))
    own.weight.data.mul_(0.5)


def _widen(own: Own) -> None:
    device = own.weight.device
    own.weight.set_(noise(2 * WIDTH, WIDTH, seed=1).to(device))
    own.bias.set_(noise(2 * WIDTH, seed=2).to(device))
    own.weight.data.mul_(0.5)


def _transpose(own: Own) -> None:
    own.weight.t_()
    own.weight.detach().mul_(0.5)


def _swap(own: Own) -> None:
    torch.utils.swap_tensors(own.weight, nn.Parameter(noise(WIDTH, WIDTH, seed=4).to(own.weight.device) / 8))


@pytest.mark.parametrize("change", [_cut, _widen, _transpose, _swap])
@pytest.mark.parametrize("share", [0.35, 0.9])
def test_a_layer_that_changes_its_own_parameters(change: Callable[[Own], None], share: float) -> None:
    module = mlp(8, WIDTH)
    module[14].__class__ = Own
    twin = twin_on(module)
    with torch.no_grad(), streaming(module, share, edited=True, keeps=True):
        for number in range(6):
            if number == 3:
                module[14].act = twin[14].act = change
            equal(on_host(call(module, number)), on_host(call(twin, number)))
    equal(on_host(list(module.state_dict().values())), on_host(list(twin.state_dict().values())))


@pytest.mark.parametrize("other", [2, 8, 14])
def test_weight_that_is_tied_in_a_pass_while_it_is_shown(other: int) -> None:
    module = mlp(8, WIDTH)
    module[6].__class__ = Tying
    twin = twin_on(module)
    with torch.no_grad(), streaming(module, edited=True, keeps=True):
        for number in range(6):
            for part in (module, twin):
                if number == 3:
                    part[6].other = [part[other]]
                elif number == 5:
                    part[other].weight.mul_(0.5)
            equal(on_host(call(module, number)), on_host(call(twin, number)))
    assert module[other].weight is module[6].weight
