"""An assistant asks about a real run: the SDK's own client, over stdio, and the server in a process of its own."""

import json
import sys
from pathlib import Path

import anyio
from mcp import Client, StdioServerParameters, stdio_client

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0


def asked(runs, questions):
    """The tools that there are, and what each question was answered with: text, and whether it is an error."""

    async def ask():
        parameters = StdioServerParameters(
            command=sys.executable, args=["-m", "sftriage", "mcp", "--runs", str(runs)], cwd=str(ROOT)
        )
        with anyio.fail_after(DEADLINE_S):
            async with Client(stdio_client(parameters)) as client:
                tools = (await client.list_tools()).tools
                results = [await client.call_tool(name, arguments) for name, arguments in questions]
                return client.instructions, tools, [(one.content[0].text, one.is_error) for one in results]

    return anyio.run(ask)


def test_an_assistant_finds_out_who_is_slow_and_why(demonstrated):
    # GIVEN a real run whose rank 2 became slow in data, and was captured
    capture = next(path.name for path in (demonstrated.run / "captures").iterdir() if "-r2-" in path.name)
    questions = [
        ("list_runs", {}),
        ("run_health", {}),
        ("verdicts", {"first_step": demonstrated.fault_step, "last_step": demonstrated.steps}),
        ("explain_window", {"window": capture}),
        ("captures_of_step", {"step": demonstrated.steps - 1}),
        ("list_captures", {}),
        ("capture_findings", {"capture": capture}),
        ("whatif", {}),
        ("advise", {}),
        ("report", {}),
        ("run_health", {"run": "../run"}),
        ("verdicts", {"first_step": -1}),
        ("remove_run", {}),
    ]
    instructions, tools, answers = asked(demonstrated.run, questions)
    # THEN every tool says what it is for, that it changes nothing, and what its arguments are
    assert "a verdict says who and where, a trace says why" in instructions
    assert {tool.name for tool in tools} == {name for name, _ in questions[:10]}
    for tool in tools:
        assert len(tool.description) > 80
        assert tool.annotations.read_only_hint
        assert all(one.get("description") for one in tool.input_schema["properties"].values())
    # AND it is answered, small, with what that stands on
    said = [json.loads(text) for text, _ in answers[:9]]
    assert [error for _, error in answers] == [False] * 10 + [True] * 3
    assert all(len(text) <= 12_200 for text, _ in answers)
    runs, health, verdicts, explained, of_step, captures, findings, whatif, advice = said
    assert runs["runs"][0]["run"] == demonstrated.run.name
    assert 2 in health["cites"]["ranks"]
    assert "rank 2 in data" in health["suspects_have_cost"]["says"]
    assert any(capture in one["captures"] for one in verdicts["newest_first"])
    assert capture in explained["cites"]["captures"]
    assert of_step["captures"] or of_step["nearest"]
    assert capture in [one["capture"] for one in captures["captures"]]
    assert "train.py" in findings["cause"]
    assert findings["cites"]["ranks"] == [2]
    assert advice["says"]
    assert whatif["slowest_workers"][0]["rank"] == 2
    # AND what is not there is said, without more than that
    assert "there is no run ../run here" in answers[10][0]
