"""Copies, pickles and files of streamed modules hold plain weights with the true values, at any moment."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

from tests.kit import agree, assert_plain, mlp, noise, same, same_state, streamed

X = noise(4, 32)


def model(seed: int = 0) -> nn.Sequential:
    """Layers with a tie and a buffer, made of classes that can be pickled."""
    module = nn.Sequential(*mlp(6, seed=seed), nn.BatchNorm1d(32), nn.Linear(32, 32)).eval()
    module[-1].weight = module[0].weight
    return module


def test_deepcopy_is_independent_and_plain() -> None:
    module = model()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=3)
        other = copy.deepcopy(module)
        assert_plain(other)
        assert all(type(p) is nn.Parameter for p in other.parameters())
        assert other[-1].weight is other[0].weight
        assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in twin.parameters()]
        agree(other, twin, X)
        with torch.no_grad():
            other[2].weight.zero_()
            other[2].bias.fill_(7.0)
        agree(module, twin, X, times=2)
        twin_of_other = copy.deepcopy(twin)
        with torch.no_grad():
            twin_of_other[2].weight.zero_()
            twin_of_other[2].bias.fill_(7.0)
        agree(other, twin_of_other, X)
    agree(other, twin_of_other, X)


def test_deepcopy_of_a_part_and_of_a_parameter() -> None:
    module = model()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=2)
        layer, weight = copy.deepcopy(module[4]), copy.deepcopy(module[6].weight)
        assert type(weight) is nn.Parameter
        assert_plain(layer)
    agree(layer, twin[4], X)
    same(weight, twin[6].weight)


def test_shallow_copy_of_a_module_gives_true_values() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=2)
        shallow = copy.copy(module[4])
        agree(shallow, twin[4], X)


@pytest.mark.parametrize("in_forward", [False, True])
def test_pickle(in_forward: bool) -> None:
    module = model()
    twin = copy.deepcopy(module)
    pickled: list[bytes] = []
    if in_forward:
        module[6].register_forward_hook(_nothing)  # the pickle refers to a hook by its name
        twin[6].register_forward_hook(_nothing)
    with streamed(module):
        agree(module, twin, X, times=2)
        if in_forward:
            handle = module[4].register_forward_hook(lambda *_: pickled.append(pickle.dumps(module[6])))
            agree(module, twin, X, times=2)
            handle.remove()
        else:
            pickled.append(pickle.dumps(module[6]))
            whole = pickle.loads(pickle.dumps(module))
            assert_plain(whole)
            agree(whole, twin, X)
            assert whole[-1].weight is whole[0].weight
    for data in pickled:
        other = pickle.loads(data)
        assert_plain(other)
        agree(other, twin[6], X)


def _nothing(_module: nn.Module, _args: Any, _output: Any) -> None:
    pass


def test_save_and_load_of_a_module_and_of_its_state_dict() -> None:
    module = model()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=3)
        whole, state = io.BytesIO(), io.BytesIO()
        torch.save(module, whole)
        torch.save(module.state_dict(), state)
    plain = io.BytesIO()
    torch.save(twin.state_dict(), plain)
    assert state.tell() < plain.tell() + 4096
    whole.seek(0)
    other = torch.load(whole, weights_only=False)
    assert_plain(other)
    agree(other, twin, X)
    state.seek(0)
    loaded = torch.load(state, weights_only=True)
    assert all(type(value) is Tensor for value in loaded.values())
    fresh = model(seed=9)
    fresh.load_state_dict(loaded)
    agree(fresh, twin, X)


def test_state_dict_taken_in_mid_forward_stays_true() -> None:
    module = model()
    twin = copy.deepcopy(module)
    states: list[dict[str, Tensor]] = []
    expected = {key: value.clone() for key, value in twin.state_dict().items()}

    def take(*_args: Any) -> None:
        states.append(module.state_dict())
        for key, value in states[-1].items():
            assert torch.equal(value, expected[key]), key

    for part in (module[2], module[8]):
        part.register_forward_hook(take)
    with streamed(module):
        agree(module, twin, X, times=3)
        for state in states:
            for key, value in expected.items():
                assert torch.equal(state[key], value), key
    assert len(states) == 6
    for state in states:
        for key, value in expected.items():
            assert torch.equal(state[key], value), key


def test_state_dict_of_a_bound_module_is_its_own_memory_or_the_masters() -> None:
    class Taking(nn.Linear):
        kept: dict[str, Tensor]

        def forward(self, x: Tensor) -> Tensor:
            self.__dict__["kept"] = self.state_dict()
            return super().forward(x)

    module = mlp(8)
    module[6] = Taking(32, 32)
    twin = copy.deepcopy(module)
    with streamed(module, edited=True):
        agree(module, twin, X, times=4)
        taken = module[6].kept
        agree(module, twin, X, times=3)
        with torch.no_grad():
            module[6].weight.add_(1.0)
            twin[6].weight.add_(1.0)
        same(taken["weight"].clone(), twin[6].weight)
    same(taken["weight"].clone(), twin[6].weight)


def test_state_dict_before_during_and_after() -> None:
    module = model()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    held = module.state_dict()
    twin = copy.deepcopy(module)
    with streamed(module):
        same_state(module, twin)
        agree(module, twin, X, times=3)
        same_state(module, twin)
        during = module.state_dict()
        assert all(value.device.type == "cpu" and not value.requires_grad for value in during.values())
        assert all(value.requires_grad for value in list(module.state_dict(keep_vars=True).values())[:2])
    for key, value in before.items():
        assert torch.equal(held[key], value)
        assert torch.equal(during[key], value)
        assert torch.equal(module.state_dict()[key], value)


def test_safetensors_files(tmp_path: Path) -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=2)
        save_file(module.state_dict(), tmp_path / "state.safetensors")
        save_model(module, str(tmp_path / "model.safetensors"))
    for name in ("state", "model"):
        loaded = load_file(tmp_path / f"{name}.safetensors")
        assert loaded.keys() == twin.state_dict().keys()
        for key, value in twin.state_dict().items():
            assert torch.equal(loaded[key], value)


def test_llama_with_tied_head_saved_while_streaming(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    module = LlamaForCausalLM(config).eval()
    twin = copy.deepcopy(module)
    twin.save_pretrained(tmp_path / "plain")
    ids = torch.arange(10).view(1, -1)
    taken: list[Tensor] = []
    module.model.layers[1].mlp.register_forward_hook(
        lambda *_: taken.append(module.state_dict()["model.layers.0.self_attn.q_proj.weight"])
    )
    with streamed(module), torch.no_grad():
        same(module(ids).logits, twin(ids).logits)
        module.save_pretrained(tmp_path / "saved")
        same(module(ids).logits, twin(ids).logits)
        same(
            module.generate(ids, max_new_tokens=4, do_sample=False),
            twin.generate(ids, max_new_tokens=4, do_sample=False),
        )
        assert module.lm_head.weight is module.model.embed_tokens.weight
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == plain.keys()
    for key, value in plain.items():
        assert torch.equal(saved[key], value)
    reloaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        same(reloaded(ids).logits, twin(ids).logits)
    for value in taken:
        same(value, twin.state_dict()["model.layers.0.self_attn.q_proj.weight"])


def test_saved_over_its_own_checkpoint(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    module = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    twin = copy.deepcopy(module)
    ids = torch.arange(10).view(1, -1)
    with streamed(module), torch.no_grad():
        same(module(ids).logits, twin(ids).logits)
        with torch.no_grad():
            module.model.layers[0].mlp.up_proj.weight.add_(0.5)
            twin.model.layers[0].mlp.up_proj.weight.add_(0.5)
        module.save_pretrained(tmp_path)
        for _ in range(2):
            same(module(ids).logits, twin(ids).logits)
    reloaded = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        same(reloaded(ids).logits, twin(ids).logits)
        same(module(ids).logits, twin(ids).logits)


def test_parameters_are_enumerated_as_ever() -> None:
    module = model()
    twin = copy.deepcopy(module)
    module[2].requires_grad_(False)
    twin[2].requires_grad_(False)
    originals = dict(module.named_parameters())
    with streamed(module):
        agree(module, twin, X, times=2)
        ours, theirs = dict(module.named_parameters()), dict(twin.named_parameters())
        assert list(ours) == list(theirs)
        assert all(ours[name] is value for name, value in module.named_parameters())
        for name, param in ours.items():
            plain = theirs[name]
            assert isinstance(param, nn.Parameter), name
            assert isinstance(param, Tensor)
            assert param.device == plain.device
            assert param.dtype == plain.dtype
            assert param.shape == plain.shape
            assert param.stride() == plain.stride()
            assert param.requires_grad == plain.requires_grad
            assert param.is_leaf
            assert param.grad is None
            assert param.is_contiguous()
            assert len(param) == len(plain)
            assert param.nbytes == plain.nbytes
        assert next(module.parameters()).device.type == "cpu"
        assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in twin.parameters())
        assert len(list(module.named_parameters(remove_duplicate=False))) == len(list(module.parameters())) + 1
    assert all(originals[name] is value for name, value in module.named_parameters())


def test_parameters_print_and_compare_as_ever() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=2)
        ours, theirs = module[4].bias, twin[4].bias
        assert repr(ours.data[:3].tolist()) == repr(theirs.data[:3].tolist())
        assert str(theirs[:2].detach()) == str(ours[:2].detach())
        assert repr(module) == repr(twin)
        assert torch.equal(ours, theirs)
        assert torch.allclose(ours, theirs)
        assert bool((ours == theirs).all())
        assert hash(ours) == hash(module[4].bias)
        assert ours in set(module.parameters())


def test_new_tensors_made_like_a_parameter_are_plain() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=2)
        weight = module[4].weight
        made = [
            torch.zeros_like(weight),
            weight.new_zeros(3),
            torch.empty_like(weight),
            weight.clone(),
            weight.to(torch.float64),
            weight.detach().clone(),
            weight.data.clone(),
            weight + 1,
            weight[1].clone(),
            torch.stack([weight, weight]),
        ]
        assert all(type(tensor) is Tensor for tensor in made)
        assert type(nn.Parameter(weight.detach().clone())) is nn.Parameter


def test_new_module_made_from_a_parameter_outlives_the_handle() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with streamed(module):
        agree(module, twin, X, times=2)
        linear = nn.Linear(32, 32)
        linear.weight = nn.Parameter(module[4].weight.data.clone())
        linear.bias = nn.Parameter(module[4].bias.detach())
        embedding = nn.Embedding.from_pretrained(module[6].weight)
        agree(linear, twin[4], X)
    agree(linear, twin[4], X)
    same(embedding(torch.tensor([3, 5])), twin[6].weight[[3, 5]])
