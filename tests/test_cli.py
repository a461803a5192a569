"""The command, called as a function."""

import errno
import json
import subprocess
import sys

import pytest

from fmstream import cli
from fmstream.cli import main
from fmstream.core.telemetry import PassRecord, Telemetry
from fmstream.report import Report


@pytest.fixture
def saved(tmp_path):
    passes = [PassRecord("unet", "sync", n, n + 1, 0.5, 0.5, 2**30, 0, 2**20) for n in range(3)]
    telemetry = Telemetry(
        started=0.0, policy="sync", device="cpu", passes=passes, link_bytes=3 * 2**30, link_seconds=1.5
    )
    path = tmp_path / "report.json"
    Report.from_telemetry(telemetry, {"fmstream": "1.0"}).save(path)
    return path


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_has_examples(capsys, arguments):
    if arguments:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
    else:
        assert main(arguments) == 0
    text = capsys.readouterr().out
    for part in (
        "usage: fmstream",
        "run ",
        "report ",
        "policies ",
        "--version",
        "examples:",
        "fmstream run --memory 6GiB generate.py",
        "fmstream report report.json --png",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100


def test_version(capsys):
    assert main(["--version"]) == 0
    name, version = capsys.readouterr().out.split()
    assert name == "fmstream"
    assert version[0].isdigit()


def test_report_prints_the_table(capsys, saved):
    assert main(["report", str(saved)]) == 0
    assert capsys.readouterr().out == f"{Report.load(saved)}\n"


def test_report_as_json(capsys, saved):
    assert main(["report", str(saved), "--json"]) == 0
    assert Report.from_dict(json.loads(capsys.readouterr().out)) == Report.load(saved)


def test_report_as_png(capsys, saved, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    assert main(["report", str(saved), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert "unet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "not an fmstream report"),
        ('{"schema": 99}', "upgrade fmstream"),
        ("{}", "'schema' is None"),
    ],
)
def test_bad_file_is_one_line_on_stderr_and_status_2(capsys, tmp_path, content, message):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    assert main(["report", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fmstream: ")
    assert message in captured.err
    assert "bad.json" in captured.err
    assert captured.err.count("\n") == 1


def test_png_that_cannot_be_written_is_status_2(capsys, saved, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["report", str(saved), "--png", str(tmp_path / "none" / "out.png")]) == 2
    assert "out.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["report"],
        ["nonsense"],
        ["report", "x", "--nonsense"],
        ["run"],
        ["run", "--memory"],
        ["run", "--memory", "1GiB"],
        ["run", "--mem", "1GiB", "script.py"],
    ],
)
def test_wrong_usage_is_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: fmstream" in capsys.readouterr().err


def test_policies_are_listed_with_what_they_do(capsys):
    from fmstream.policies import names

    assert main(["policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(names())
    assert all(len(line.split()) > 3 for line in lines)


def test_module_runs_and_imports_no_torch(saved):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['fmstream', 'report', {str(saved)!r}]\n"
        "try:\n    runpy.run_module('fmstream', run_name='__main__')\n"
        "except SystemExit as stopped:\n    print('status', stopped.code)\n"
        "print('torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-2:] == ["status 0", "False"]
    assert result.stderr == ""


def test_help_of_run_names_every_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for part in ("usage: fmstream run [options] SCRIPT", "--memory", "--policy", "--device", "--config", "--progress"):
        assert part in text
    assert "--report FILE" in text


def test_reader_that_stops_early_is_no_error(saved):
    command = f"{sys.executable} -m fmstream report {saved} --json | head -c 1"
    result = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert result.stderr == ""


def test_a_failure_of_the_system_names_no_file_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cli, "_policies", fail)
    assert main(["policies"]) == 2
    assert capsys.readouterr().err == f"fmstream: [Errno {errno.ENOSPC}] No space left on device\n"
