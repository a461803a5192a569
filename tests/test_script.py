"""``fmstream run script.py``: models of an unchanged script stream from their first call on."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmstream.cli import main
from fmstream.config import StreamConfig
from fmstream.doors.script import streaming
from fmstream.errors import MemoryBudgetError
from fmstream.payloads.absent import Absent
from fmstream.report import Report
from tests.clients.client import client
from tests.clients.pipelines import stable_diffusion
from tests.kit import assert_plain, budget, mlp, noise, same, weights_bytes

X = noise(4, 32)
MODEL = """
import sys, torch
from torch import nn
torch.manual_seed(4)
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
x = torch.randn(3, 64)
"""
LOOP = """
with torch.no_grad():
    outputs = [model(x) for _ in range(4)]
torch.save(outputs, OUT)
"""


@pytest.fixture(autouse=True)
def interpreter_is_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A script changes what it is told and where it imports from."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    assert nn.Module.__dict__["_compiled_call_impl"] is None


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(source: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(source.replace("OUT", repr(str(tmp_path / "out.pt"))))
        return str(path)

    return write


def outputs(tmp_path: Path) -> Any:
    return torch.load(tmp_path / "out.pt", weights_only=False)


def run(options: Sequence[str], path: str, *arguments: str) -> int:
    return main(["run", *options, path, *arguments])


# The script as it is seen from within


def test_script_is_main_with_its_arguments_and_its_folder(
    script: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "neighbour_of_script.py").write_text("value = 7\n")
    path = script("import sys, neighbour_of_script as n\nprint(__name__, __file__, sys.argv, n.value, sys.path[0])\n")
    assert run([], path, "--steps", "3", "-h") == 0
    said = capsys.readouterr()
    assert said.out == f"__main__ {path} {[path, '--steps', '3', '-h']} 7 {tmp_path}\n"
    assert said.err == "fmstream: the script called no model\n"


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        (["--memory", "90%", "SCRIPT"], []),
        (["--memory=90%", "SCRIPT", "--policy", "sync", "a", "--memory", "1"], ["a", "--memory", "1"]),
        (["SCRIPT", "--memory", "90%", "--policy=sync", "--", "--memory", "1"], ["--memory", "1"]),
        (["SCRIPT", "--", "--", "x"], ["--", "x"]),
        (["SCRIPT", "--progress", "--other"], ["--other"]),
        (["--policy", "sync", "SCRIPT", "--help"], ["--help"]),
    ],
)
def test_options_stand_before_or_right_behind_the_script(
    script: Callable[[str], str], capsys: pytest.CaptureFixture[str], given: list[str], arguments: list[str]
) -> None:
    path = script("import sys\nprint(sys.argv[1:])\n")
    assert main(["run", *(path if part == "SCRIPT" else part for part in given)]) == 0
    assert capsys.readouterr().out == f"{arguments}\n"


@pytest.mark.parametrize("code", [0, 3, "a message", None])
def test_exit_status_passes_through(script: Callable[[str], str], code: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        run([], script(f"import sys\nsys.exit({code!r})\n"))
    assert stopped.value.code == code


@pytest.mark.parametrize("error", ["ValueError('mine')", "FileNotFoundError(2, 'mine')", "KeyboardInterrupt('mine')"])
def test_exceptions_pass_through_and_models_are_put_back(
    script: Callable[[str], str], capsys: pytest.CaptureFixture[str], error: str
) -> None:
    path = script(MODEL + f"sys.modules['kept'] = model\nmodel(x), model(x)\nraise {error}\n")
    try:
        with pytest.raises(BaseException, match="mine") as raised:
            run(["--memory", "40%"], path)
        assert type(raised.value).__name__ == error.partition("(")[0]
        assert_plain(sys.modules["kept"])
    finally:
        del sys.modules["kept"]
    assert "Sequential" in capsys.readouterr().err  # the report


@pytest.mark.parametrize(
    ("options", "path", "message"),
    [
        ([], "none.py", "script 'none.py' does not exist: give the path of a Python file"),
        ([], ".", "script '.' is a folder"),
        (["--memory", "much"], "SCRIPT", "memory='much' is no size"),
        (["--policy", "overlap"], "SCRIPT", "policy 'overlap' is not known; did you mean"),
        (["--config", "none.toml"], "SCRIPT", "config='none.toml' cannot be read"),
        (["--report", "none/r.json"], "SCRIPT", "--report none/r.json: there is no such folder"),
    ],
)
def test_what_cannot_be_used_is_told_before_the_script_runs(
    script: Callable[[str], str], capsys: pytest.CaptureFixture[str], options: list[str], path: str, message: str
) -> None:
    assert run(options, script("print('ran')\n") if path == "SCRIPT" else path) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"fmstream: {message}")
    assert said.err.count("\n") == 1


def test_too_little_memory_names_the_least_that_works(
    script: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--memory", "1000"], script(MODEL + "model(x)\n")) == 2
    said = capsys.readouterr().err
    assert re.search(r"the smallest that works is \d+ bytes, because 'Sequential\.\d+'", said)


# What streams


def test_model_streams_and_outputs_are_those_of_python(
    script: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(MODEL + LOOP)
    runpy.run_path(path, run_name="__main__")
    plain = outputs(tmp_path)
    report_file = tmp_path / "report.json"
    assert run(["--memory", "40%", "--report", str(report_file)], path) == 0
    same(outputs(tmp_path), plain)
    report = Report.load(report_file)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"{report}\n"
    (root,) = report.roots
    assert root.root == "Sequential"
    assert root.passes == 4
    assert root.streamed_bytes > 0


def test_model_that_fits_is_left_alone(
    script: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(MODEL + LOOP + "print(type(model[0].weight).__name__)\n")
    assert run(["--memory", "none"], path) == 0
    said = capsys.readouterr()
    assert said.out == "Parameter\n"
    assert "nothing is streamed" in said.err


def test_config_file_and_options_above_it(
    script: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('memory = "1000"\npolicy = "one_ahead"\n')
    assert run(["--config", str(config), "--memory", "60%"], script(MODEL + LOOP)) == 0
    assert "policy one_ahead" in capsys.readouterr().err


PIPELINE = """
import torch
from tests.clients.client import client
from tests.clients.pipelines import stable_diffusion
built = client("pipeline", stable_diffusion).build()
torch.save([built.call() for _ in range(2)], OUT)
"""
GENERATE = """
import torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0,
)
transformers.LlamaForCausalLM(config).save_pretrained(OUT + ".model")
model = transformers.LlamaForCausalLM.from_pretrained(OUT + ".model")
ids = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(5))
torch.save(model.generate(ids, max_new_tokens=6, do_sample=False), OUT)
"""
COMPILED = MODEL + "model.compile(backend='eager')\n" + LOOP
METHOD = """
import torch
from tests.clients.client import client, noise
from tests.clients.diffusion import vector_quantised
torch.save([client("vq", vector_quantised).build().call() for _ in range(1)], OUT)
"""


@pytest.mark.parametrize(
    ("source", "roots"),
    [
        (PIPELINE, {"unet", "vae", "text_encoder"}),
        (GENERATE, {"LlamaForCausalLM"}),
        (COMPILED, {"Sequential"}),
        (METHOD, {"VQModel"}),
    ],
    ids=["pipeline", "generate", "compiled", "method"],
)
def test_twins(script: Callable[[str], str], tmp_path: Path, source: str, roots: set[str]) -> None:
    path = script(source)
    runpy.run_path(path, run_name="__main__")
    plain = outputs(tmp_path)
    assert run(["--memory", "70%", "--report", str(tmp_path / "report.json")], path) == 0
    same(outputs(tmp_path), plain)
    report = Report.load(tmp_path / "report.json")
    assert not (tmp_path / "report-2.json").exists()
    assert {row.root.partition(".")[0] for row in report.roots} == roots
    assert sum(row.streamed_bytes for row in report.roots) > 0


# Which modules are found, and when


def config(modules: Any, fraction: float = 0.3) -> StreamConfig:
    return StreamConfig(memory=budget(modules, fraction))


def is_streaming(module: nn.Module) -> bool:
    return any(isinstance(param, Absent) for inner in module.modules() for param in inner._parameters.values())


def test_pipeline_is_found_as_a_whole_at_its_first_call() -> None:
    built = client("pipeline", stable_diffusion).build()
    reports: list[Report] = []
    with streaming(config(built.modules), reports):
        built.call()
        assert is_streaming(built.modules.unet)
        assert is_streaming(built.modules.text_encoder)
        assert is_streaming(built.modules.vae)
    assert len(reports) == 1
    assert_plain(built.modules)


def test_two_models_share_one_memory() -> None:
    first, second = mlp(6), mlp(8, seed=1)
    plain = first(X), second(X)
    reports: list[Report] = []
    memory = budget({"first": first, "second": second}, 0.2)
    with streaming(StreamConfig(memory=memory), reports):
        for _ in range(3):
            same(first(X), plain[0])
        for _ in range(3):
            same((first(X), second(X)), plain)
        assert is_streaming(first)
        assert is_streaming(second)
    one, both = reports
    assert one.memory_bytes == both.memory_bytes == memory
    assert one.weights_bytes == weights_bytes(first)
    assert both.weights_bytes == weights_bytes({"first": first, "second": second})
    assert {row.root for row in both.roots} == {"Sequential", "Sequential 2"}


def test_part_that_was_called_first_gives_way_to_the_whole() -> None:
    model = nn.Sequential(mlp(4), mlp(4, seed=1))
    plain = model(X)
    reports: list[Report] = []
    with streaming(config(model), reports):
        model[0](X)
        for _ in range(2):
            same(model(X), plain)
    assert reports[-1].weights_bytes == weights_bytes(model)


def test_caller_that_is_a_module_is_found_with_what_it_calls() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(4), mlp(4, seed=1)

        def encode(self, x: Tensor) -> Any:
            return self.encoder(x)

    wrapper = Wrapper()
    reports: list[Report] = []
    with streaming(config(wrapper), reports):
        wrapper.encode(X)
        assert is_streaming(wrapper.decoder)
    assert len(reports) == 1


def test_modules_without_parameters_are_left_alone() -> None:
    reports: list[Report] = []
    with streaming(StreamConfig(), reports):
        same(nn.ReLU()(X), X.relu())
        same(nn.Sequential(nn.Tanh(), nn.ReLU())(X), X.tanh().relu())
    assert reports == []


def test_model_that_the_script_drops_is_freed_when_the_next_one_comes() -> None:
    first, second = mlp(6), mlp(6, seed=1)
    reports: list[Report] = []
    with streaming(config(first), reports), torch.no_grad():
        first(X)
        gone = weakref.ref(first)
        del first
        second(X)
        assert gone() is None
    assert [report.weights_bytes for report in reports] == [weights_bytes(second)] * 2


class Hides(nn.Module):
    """Calls a module that is none of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6)
        self.hidden = [mlp(2, seed=1)]

    def forward(self, x: Tensor) -> Any:
        return self.body(self.hidden[0](x))


def test_module_first_called_within_a_pass_is_as_it_was() -> None:
    model = Hides()
    plain = model(X)
    reports: list[Report] = []
    with streaming(config(model), reports):
        for _ in range(3):
            same(model(X), plain)
        assert not is_streaming(model.hidden[0])
        model.hidden[0](X)
        assert is_streaming(model.hidden[0])
    assert_plain(model.hidden[0])


def test_models_of_several_threads() -> None:
    models = [mlp(4, seed=seed) for seed in range(4)]
    plain = [model(X) for model in models]
    results: list[Any] = [None] * 4

    def work(index: int) -> None:
        with torch.no_grad():
            results[index] = [models[index](X) for _ in range(5)]

    reports: list[Report] = []
    with streaming(config(dict(enumerate(models))), reports):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result, expected in zip(results, plain, strict=True):
        for output in result:
            same(output, expected)
    for model in models:
        assert_plain(model)


def test_own_compiled_call_stays_where_it_is() -> None:
    model = mlp(6)
    calls = []

    def compiled(*args: Any) -> Any:
        calls.append(args)
        return model._call_impl(*args)

    plain = model(X)
    with streaming(config(model), []):
        model._compiled_call_impl = compiled
        assert model.__dict__["_compiled_call_impl"] is compiled
        same(model(X), plain)
        assert is_streaming(model)
    assert calls
    assert model.__dict__["_compiled_call_impl"] is compiled
    with streaming(config(model), []):
        del model._compiled_call_impl
        assert "_compiled_call_impl" not in model.__dict__
        with pytest.raises(AttributeError, match="_compiled_call_impl"):
            del model._compiled_call_impl


def test_opening_that_fails_leaves_the_models_usable() -> None:
    model = mlp(6)
    plain = model(X)
    with streaming(StreamConfig(memory=1000), []), pytest.raises(MemoryBudgetError):
        model(X)
    same(model(X), plain)
    assert_plain(model)


# The process


def test_ctrl_c_ends_the_script_as_it_does_under_python(script: Callable[[str], str]) -> None:
    path = script(MODEL + "model(x)\nprint('ready', flush=True)\nwhile True:\n    model(x)\n")
    command = [sys.executable, "-m", "fmstream", "run", "--memory", "40%", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        process.wait()
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in said
    assert "Sequential" in said


def test_status_of_the_process_is_the_scripts(script: Callable[[str], str]) -> None:
    path = script("import atexit, sys\natexit.register(print, 'at exit')\nraise SystemExit(5)\n")
    done = subprocess.run([sys.executable, "-m", "fmstream", "run", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (5, "at exit\n", "")


class Untouched(nn.Module):
    """Computes nothing: the threads that PyTorch computes with are not there in a forked child."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(6)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_child_process_does_not_open_handles() -> None:
    model = Untouched()
    with streaming(config(model), []):
        child = os.fork()
        if child == 0:
            os._exit(int(is_streaming(model) or model(X) is not X or is_streaming(model)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert model(X) is X
        assert is_streaming(model)
