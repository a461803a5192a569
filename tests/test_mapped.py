"""Weights that lie in files: never read but as planned, never lost, and the file is the user's own."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import fmstream
from fmstream.device import spill
from fmstream.device.homes import FileHome, MemoryHome
from fmstream.errors import ConfigError
from tests.kit_runtime import (
    TIMEOUT,
    Twin,
    assert_all_in_files,
    check_pages,
    leaves_nothing,
    make_input,
    make_mlp,
    mapped_twin,
    masters_of,
    memory_for,
    mlp_twin,
    open_descriptors,
    poison,
    run_python,
    weights_bytes,
)

__all__ = ["leaves_nothing"]


class ReadsChild(nn.Module):
    """The parent uses its children's weights and never calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)
        self.rest = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.first.weight, self.first.bias) @ self.second.weight.t()
        for layer in self.rest:
            x = layer(x)
        return x + self.second.weight[0]


def loaded(module: nn.Module, path: Path) -> nn.Module:
    """A second module of the same kind, whose weights are loaded from a file of the first one's."""
    save_file(module.state_dict(), path)
    return fmstream.load(lambda: copy.deepcopy(module), path)


@pytest.mark.parametrize("share", [0.35, 0.7])
@pytest.mark.parametrize("make", [make_mlp, ReadsChild])
@pytest.mark.parametrize("policy", ["overlap_async", "one_ahead", "sync"])
def test_only_planned_reads_give_values(policy: str, make: Any, share: float, tmp_path: Path) -> None:
    module = make()
    x = make_input(32 if make is ReadsChild else 64)
    twin = Twin(module, x)
    mapped = loaded(module, tmp_path / "w.safetensors")
    with fmstream.stream(mapped, memory=memory_for(mapped, share), policy=policy) as handle, torch.no_grad():
        assert_all_in_files(handle)
        poison(handle)
        for _ in range(5):
            assert torch.equal(mapped(x), twin.expected)
            check_pages(handle)
        for name, value in mapped.state_dict().items():
            assert torch.equal(value + 0, twin.copy.state_dict()[name])
        assert handle.report.file_bytes == weights_bytes(module)
        assert handle.report.ram_bytes == 0
        assert all(master.original.isnan().all() for master in masters_of(handle))


def tiny_llama(folder: Path) -> tuple[Any, Any]:
    """A Llama of two layers and a plain twin of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_language_model_that_was_loaded_from_its_folder_generates_the_same(share: float, tmp_path: Path) -> None:
    model, twin = tiny_llama(tmp_path / "llama")
    tokens = torch.tensor([[1, 5, 9, 13]])
    expected = twin.generate(tokens, max_new_tokens=12, do_sample=False)
    with fmstream.stream(model, memory=memory_for(model, share)) as handle:
        assert_all_in_files(handle)
        poison(handle)
        for _ in range(2):
            assert torch.equal(model.generate(tokens, max_new_tokens=12, do_sample=False), expected)
        check_pages(handle)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert sum(record.streamed_bytes for record in handle.telemetry.passes) > 0


def test_a_model_is_loaded_from_its_folder_without_a_copy(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    _, twin = tiny_llama(tmp_path / "llama")
    model = fmstream.load(LlamaForCausalLM, tmp_path / "llama")
    tokens = torch.tensor([[1, 5, 9, 13]])
    with fmstream.stream(model, memory=memory_for(model, 0.5)) as handle, torch.no_grad():
        assert_all_in_files(handle)
        poison(handle)
        for _ in range(3):
            assert torch.equal(model(tokens).logits, twin(tokens).logits)


def test_an_edit_before_the_handle_wins_over_the_file(tmp_path: Path) -> None:
    twin = mapped_twin(tmp_path / "w.safetensors")
    with torch.no_grad():
        twin.module[2].weight.mul_(2)  # type: ignore[index, operator, union-attr]
        twin.copy[2].weight.mul_(2)  # type: ignore[index, operator, union-attr]
    twin.expected = twin.plain()
    with fmstream.stream(twin.module, memory=twin.memory) as handle:
        homes = {master.name: master.home for master in masters_of(handle)}
        assert isinstance(homes["2.weight"], MemoryHome)
        assert isinstance(homes["8.weight"], FileHome)
        for _ in range(4):
            twin.check_call()
    twin.check_restored()


@pytest.mark.parametrize("how", ["inplace", "data", "item", "original", "load_state_dict"])
def test_an_edit_while_streaming_moves_to_ram_and_later_passes_see_it(how: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    twin = mapped_twin(path)
    content = path.read_bytes()
    with fmstream.stream(twin.module, memory=twin.memory) as handle:
        for index in (2, 8, 2):
            for _ in range(3):
                twin.check_call()
            streamed, plain = twin.module[index], twin.copy[index]  # type: ignore[index]
            with torch.no_grad():
                if how == "inplace":
                    streamed.weight.add_(0.5)  # type: ignore[operator, union-attr]
                elif how == "data":
                    streamed.weight.data.add_(0.5)  # type: ignore[operator, union-attr]
                elif how == "item":
                    streamed.weight[0, :] = 3.5  # type: ignore[index, operator, union-attr]
                elif how == "original":
                    twin.params[f"{index}.weight"]().add_(0.5)  # type: ignore[union-attr]
                else:
                    state = {name: value + 0.5 for name, value in twin.copy.state_dict().items()}
                    twin.module.load_state_dict(state)
                    twin.copy.load_state_dict(state)
                if how == "item":
                    plain.weight[0, :] = 3.5  # type: ignore[index, operator, union-attr]
                elif how != "load_state_dict":
                    plain.weight.add_(0.5)  # type: ignore[operator, union-attr]
            twin.expected = twin.plain()
            twin.check_call()
            home = next(m.home for m in masters_of(handle) if m.name == f"{index}.weight")
            assert isinstance(home, MemoryHome)
        for _ in range(3):
            twin.check_call()
        check_pages(handle)
    twin.check_restored()
    assert path.read_bytes() == content


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_file_that_is_replaced_keeps_giving_its_old_values(when: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    twin = mapped_twin(path)
    save_file({name: value * 0 for name, value in twin.copy.state_dict().items()}, tmp_path / "other")
    if when == "before":
        os.replace(tmp_path / "other", path)
    with fmstream.stream(twin.module, memory=twin.memory) as handle:
        for number in range(6):
            if when == "while" and number == 3:
                os.replace(tmp_path / "other", path)
            twin.check_call()
        check_pages(handle)
    twin.check_restored()


def test_a_file_that_is_deleted_keeps_giving_its_values(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    twin = mapped_twin(path)
    with fmstream.stream(twin.module, memory=twin.memory):
        twin.check_call()
        path.unlink()
        for _ in range(4):
            twin.check_call()
    twin.check_restored()
    twin.check_streams()


def test_a_file_that_is_cut_is_an_error_that_names_it_and_no_crash(tmp_path: Path) -> None:
    done = run_python(
        """
        import os, sys, torch, fmstream
        from pathlib import Path
        from tests.kit_runtime import mapped_twin
        path = Path(sys.argv[1])
        twin = mapped_twin(path, 8, 256)
        with fmstream.stream(twin.module, memory=twin.memory) as handle:
            twin.check_call()
            os.truncate(path, 4096)
            try:
                for _ in range(3):
                    twin.check_call()
            except (OSError, fmstream.StreamError) as error:
                print("named" if str(path) in str(error) else error)
        assert all(p is twin.params[n]() for n, p in twin.module.named_parameters())
        assert not any("_compiled_call_impl" in m.__dict__ for m in twin.module.modules())
        twin.module.load_state_dict(twin.copy.state_dict(), assign=True)
        twin.remember()
        twin.check_restored()
        print("usable")
        """,
        str(tmp_path / "w.safetensors"),
    )
    assert done.stdout == "named\nusable\n", (done.returncode, done.stderr)


def test_saving_onto_the_same_path_while_streaming(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    model, twin = tiny_llama(folder)
    tokens = torch.tensor([[1, 5, 9, 13]])
    with torch.no_grad():
        expected = twin(tokens).logits
        with fmstream.stream(model, memory=memory_for(model, 0.5)) as handle:
            for _ in range(3):
                assert torch.equal(model(tokens).logits, expected)
            model.save_pretrained(folder)
            for _ in range(3):
                assert torch.equal(model(tokens).logits, expected)
            check_pages(handle)
        assert torch.equal(model(tokens).logits, expected)
        again = type(model).from_pretrained(folder).eval()
        assert torch.equal(again(tokens).logits, expected)
    saved = load_file(folder / "model.safetensors")
    for name, value in twin.state_dict().items():
        if name in saved:
            assert torch.equal(saved[name], value)


def test_a_state_dict_in_the_midst_of_a_pass_is_true(tmp_path: Path) -> None:
    twin = mapped_twin(tmp_path / "w.safetensors")
    states: list[dict[str, torch.Tensor]] = []
    with fmstream.stream(twin.module, memory=twin.memory) as handle:
        for _ in range(3):
            twin.check_call()
        poison(handle)
        hook = twin.module[4].register_forward_hook(  # type: ignore[index, union-attr]
            lambda *_: states.append({name: value + 0 for name, value in twin.module.state_dict().items()})
        )
        twin.check_call()
        twin.check_call()
        hook.remove()
        kept = twin.module.state_dict()
        twin.check_call()
        states.append({name: value + 0 for name, value in kept.items()})
    for state in states:
        for name, value in twin.copy.state_dict().items():
            assert torch.equal(state[name], value)


def spilled(folder: Path) -> bool:
    """Whether this process has a spill file under a folder open, with a name or without."""
    return any("spill" in path for path in open_descriptors(folder))


def test_spilled_weights_leave_ram_and_come_back(tmp_path: Path) -> None:
    twin = mlp_twin(8, 1024)
    twin.check_call()
    small = mlp_twin(4)
    with fmstream.stream(small.module, memory=small.memory):
        small.check_call()  # libraries that streaming loads are there now
    process = psutil.Process()
    before = process.memory_info().rss
    memory = memory_for(twin.module, 0.2)
    with fmstream.stream(twin.module, memory=memory, spill_dir=tmp_path) as handle:
        during = process.memory_info().rss
        assert before - during > twin.num_bytes // 2
        assert spilled(tmp_path)
        large = [master for master in masters_of(handle) if master.span >= 4096]
        assert all(isinstance(master.home, FileHome) for master in large)
        assert handle.report.file_bytes >= sum(master.span for master in large)
        for _ in range(3):
            twin.check_call()
        check_pages(handle)
    assert not spilled(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert process.memory_info().rss - before < twin.num_bytes // 2
    twin.check_restored()
    for param in twin.module.parameters():
        assert not param.is_inference()
        param.requires_grad_(False)
        param.add_(0)
        param.requires_grad_(True)


def test_spilled_weights_are_read_as_planned_only_and_keep_edits(tmp_path: Path) -> None:
    twin = mlp_twin()
    with fmstream.stream(twin.module, memory=twin.memory, spill_dir=tmp_path) as handle:
        for _ in range(3):
            twin.check_call()
        with torch.no_grad():
            twin.module[4].weight.mul_(2)  # type: ignore[index, operator, union-attr]
            twin.copy[4].weight.mul_(2)  # type: ignore[index, operator, union-attr]
        twin.expected = twin.plain()
        for _ in range(3):
            twin.check_call()
        check_pages(handle)
    twin.check_restored()


def test_spilling_twice_and_within_another_handle(tmp_path: Path) -> None:
    twin = mlp_twin()
    with fmstream.stream(twin.module, memory=twin.memory, spill_dir=tmp_path) as outer:
        twin.check_call()
        with fmstream.stream(twin.module, memory=twin.memory, spill_dir=tmp_path):
            for _ in range(3):
                twin.check_call()
        for _ in range(3):
            twin.check_call()
        check_pages(outer)
    assert list(tmp_path.iterdir()) == []
    twin.check_restored()


def test_a_failure_while_weights_are_spilled_brings_them_back(tmp_path: Path) -> None:
    twin = mlp_twin()

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = twin.module[4].register_forward_hook(interrupt)  # type: ignore[index, union-attr]
    with pytest.raises(KeyboardInterrupt), fmstream.stream(twin.module, memory=twin.memory, spill_dir=tmp_path):
        twin.check_call()
    hook.remove()
    twin.check_restored()
    assert list(tmp_path.iterdir()) == []


def test_no_room_to_spill_is_a_clear_error_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = mlp_twin()
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(spill.shutil, "disk_usage", lambda path: full)
    with pytest.raises(ConfigError, match=r"1000 are free.*spill_dir"):
        fmstream.stream(twin.module, memory=twin.memory, spill_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not spilled(tmp_path)
    twin.check_restored()


def test_a_disk_that_fills_up_is_a_clear_error_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    twin = mlp_twin()
    write = os.write
    written = [0]

    def fill(fd: int, data: Any) -> int:
        if memoryview(data).nbytes < 4096:
            return write(fd, data)
        written[0] += 1
        if written[0] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(spill.os, "write", fill)
        with pytest.raises(ConfigError, match="spill_dir"):
            fmstream.stream(twin.module, memory=twin.memory, spill_dir=tmp_path)
    assert written[0] == 3
    assert list(tmp_path.iterdir()) == []
    twin.check_restored()


@pytest.mark.parametrize("place", ["missing", "file"])
def test_a_folder_that_cannot_take_a_spill_file(place: str, tmp_path: Path) -> None:
    twin = mlp_twin()
    folder = tmp_path / "there"
    if place == "file":
        folder.write_text("no folder")
    with pytest.raises(ConfigError, match=r"there.*spill_dir"):
        fmstream.stream(twin.module, memory=twin.memory, spill_dir=folder)
    twin.check_restored()


def test_nothing_is_spilled_where_all_fits(tmp_path: Path) -> None:
    twin = mlp_twin()
    with fmstream.stream(twin.module, memory=None, spill_dir=tmp_path):
        assert not spilled(tmp_path)
        twin.check_call()
    twin.check_restored()


def test_a_killed_process_leaves_no_spill_file(tmp_path: Path) -> None:
    done = run_python(
        """
        import os, signal, sys, fmstream
        from tests.kit_runtime import mlp_twin
        twin = mlp_twin()
        handle = fmstream.stream(twin.module, memory=twin.memory, spill_dir=sys.argv[1])
        twin.check_call()
        os.kill(os.getpid(), signal.SIGTERM)
        """,
        str(tmp_path),
        timeout=2 * TIMEOUT,
    )
    assert done.returncode == -15, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_files_are_closed_with_the_handle_and_can_be_deleted(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    twin = mapped_twin(path)
    with fmstream.stream(twin.module, memory=twin.memory):
        twin.check_call()
        assert open_descriptors(tmp_path) == [str(path)]
    assert open_descriptors(tmp_path) == []
    path.unlink()
    twin.check_restored()


def test_tied_weights_are_loaded_once_and_stay_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(40, 32)
            self.body = make_mlp(4, 32)
            self.head = nn.Linear(32, 40, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed(tokens)))  # type: ignore[no-any-return]

    module = Tied()
    save_file({k: v for k, v in module.state_dict().items() if k != "head.weight"}, tmp_path / "w.safetensors")
    mapped = fmstream.load(Tied, tmp_path / "w.safetensors", strict=False)
    assert mapped.head.weight is mapped.embed.weight
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = module.eval()(tokens)
        with fmstream.stream(mapped, memory=memory_for(mapped, 0.6)) as handle:
            assert_all_in_files(handle)
            poison(handle)
            for _ in range(4):
                assert torch.equal(mapped(tokens), expected)
