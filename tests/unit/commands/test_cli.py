"""The command line as a whole: help, examples, refusals, output, progress and metrics."""

import io
import json
import re
import shlex
import sys
from functools import partial

import pytest
from rich.console import Console

from sftriage.commands import cli, output
from sftriage.commands.cli import COMMANDS, Command, Entry
from sftriage.reports.texts import titled
from sftriage.runtime.local import job_name
from sftriage.sinks.metering import Metering
from sftriage.traces.store import LocalStore
from tests.unit.conftest import run_in

NAMES = [entry.name for entry in COMMANDS]


@pytest.mark.parametrize("name", NAMES)
def test_each_command_explains_itself_in_80_columns(sftriage, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    outcome = sftriage(*name.split(), "-h")
    assert (outcome.code, outcome.err) == (0, "")
    described, _, examples = outcome.out.partition("For example:")
    # THEN no line is cut off, and metavars are names, not types
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert name == "reduce" or not re.search(r"<(bool|str|int|float|path|list|datetime)\b", described)
    # AND every option is explained
    assert not re.search(r"^  -\S+( \S+)?\n  -", described, re.MULTILINE)
    assert examples.strip().startswith("sftriage ")


@pytest.mark.parametrize("entry", COMMANDS, ids=NAMES)
def test_each_example_is_valid(entry: Entry):
    name = entry.name.split()
    for example in entry.examples:
        words = shlex.split(example.partition(" > ")[0], comments=True)
        assert words[: 1 + len(name)] == ["sftriage", *name]
        # Parsed but not run: this refuses unknown options and invalid values.
        context = Command(entry).make_context(name[-1], words[1 + len(name) :])
        assert context.command.name == name[-1]


PLUGIN = {
    "status -A": "kube status -A",
    "--help": "kube --help",
    "get look-1 -n ml": "traces get --cluster look-1 -n ml",
    "traces open --job a": "traces open --cluster --job a",
    "list": "traces list --cluster",
    "traces show w1": "traces show w1",
}


@pytest.mark.parametrize(("words", "command"), PLUGIN.items(), ids=PLUGIN)
def test_kubectl_sftriage_reads_traces_from_the_cluster(monkeypatch, words, command):
    monkeypatch.setattr(cli, "main", lambda: None)
    monkeypatch.setattr(sys, "argv", ["kubectl-sftriage", *words.split()])
    cli.kubectl_plugin()
    assert sys.argv == ["sftriage", *command.split()]


CLUSTER_MISTAKES = {
    "list -n ml": "--namespace and --context need --cluster",
    "get c --job a": "--job needs --cluster",
    "get --cluster --rank 1 c": "--step and --rank need --job",
    "get --cluster": "give either a capture or --job",
    "open --cluster c --job a": "give either a capture or --job",
    "get": "give a capture; list them with `sftriage traces list`",
    "list --cluster --run x --host n1": "--run, --host: not with --cluster",
    "open --cluster c --catalogue sqlite:///x": "--catalogue: not with --cluster",
}


@pytest.mark.parametrize(("words", "refusal"), CLUSTER_MISTAKES.items(), ids=CLUSTER_MISTAKES)
def test_options_of_a_cluster_that_contradict_each_other_are_refused(sftriage, words, refusal):
    assert sftriage("traces", *words.split()).refusal == f"sftriage: {refusal}\n"


@pytest.mark.parametrize("group", ["", "traces"])
def test_a_group_without_a_subcommand_prints_its_help(sftriage, group):
    assert sftriage(*group.split()).refusal.startswith(f"Usage: sftriage {group}".rstrip())


@pytest.fixture
def run(tmp_path):
    return run_in(tmp_path / "run")


@pytest.mark.parametrize(
    ("command", "job"),
    [
        (["torchrun", "--nproc-per-node", "8", "jobs/train.py", "--lr", "1"], "train"),
        (["python", "-m", "my.package.train", "--steps", "3"], "train"),
        (["python", "-m", "torch.distributed.run", "--standalone", "jobs/train.py"], "train"),
        (["/usr/bin/launch", "--all"], "launch"),
    ],
)
def test_a_job_is_called_after_its_script(command, job):
    assert job_name(None, command) == job


def test_damaged_captures_are_reported_and_the_others_listed(sftriage, run, trace, make_manifest):
    # GIVEN a run without captures THEN a message names the command that says why
    assert f"`sftriage decisions --run {run.path}` says why" in sftriage("traces", "list", "--run", run.path).err
    # WHEN its only capture is damaged THEN the message says so
    bad, other = "w0-9-r1-x-1", "w0-9-r2-x-2"
    store = LocalStore(run.path)
    store.put(bad, trace, lambda artefact: make_manifest(bad, artefact))
    (run.path / "captures" / bad / "manifest.json").write_text("{}", encoding="utf-8")
    listed = sftriage("traces", "list", "--run", run.path)
    assert listed.out == ""
    assert f"No capture in {run.path / 'captures'} can be used." in listed.err
    assert "decisions" not in listed.err
    # AND an intact one is listed beside it, although it was not indexed yet
    store.put(other, trace, lambda artefact: make_manifest(other, artefact))
    listed = sftriage("traces", "list", "--run", run.path, "--json")
    assert [(row["capture_id"], row["rank"], row["stage"]) for row in json.loads(listed.out)] == [(other, 2, "data")]
    assert f"capture {bad} is damaged" in listed.err


@pytest.mark.parametrize(
    ("bar", "done", "shown"),
    [
        (partial(output.copying, "trace.json.gz", 4096), [(1024,), (4096,)], ("trace.json.gz", "4.0/4.0 KiB")),
        (partial(output.counting, "Reading manifests"), [(1, 3), (3, 3)], ("Reading manifests", "3/3")),
    ],
)
def test_progress_is_shown_only_on_a_terminal(capsys, monkeypatch, bar, done, shown):
    def act():
        with bar() as progress:
            for numbers in done:
                progress(*numbers)

    act()
    assert capsys.readouterr() == ("", "")
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(output, "notices", lambda: terminal)
    act()
    assert all(words in terminal.file.getvalue() for words in shown)


@pytest.mark.parametrize(
    "odd", ["log (train.py:100: x[i])", "a :warning: [bold]b[/bold]", "[/] :x: [link=y]z", "\\[red]"]
)
def test_foreign_text_is_neither_markup_nor_emoji(capsys, monkeypatch, odd):
    monkeypatch.setenv("COLUMNS", "200")
    output.write(odd)
    output.tell(odd)
    output.lists().print(titled(odd, [odd]), odd)
    table = titled("cells", ["name"])
    table.add_row(odd)
    output.lists().print(table)
    written = capsys.readouterr()
    assert (written.out.count(odd), written.err.count(odd)) == (5, 1)


def test_without_options_there_are_no_metrics():
    meter = Metering()
    assert (meter.url, meter.sinks("train", "run", 0.0)) == (None, [])
