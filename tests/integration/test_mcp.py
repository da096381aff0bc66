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
    # GIVEN a real run whose rank 2 became slow in data, and was captured (tests/golden has every tool and its answers)
    capture = next(path.name for path in (demonstrated.run / "captures").iterdir() if "-r2-" in path.name)
    around = {"first_step": demonstrated.fault_step, "last_step": demonstrated.steps}
    questions = [("run_health", {}), ("verdicts", around), ("capture_findings", {"capture": capture}), ("whatif", {})]
    wrong = [("run_health", {"run": "../run"}), ("verdicts", {"first_step": -1}), ("remove_run", {})]
    instructions, tools, answers = asked(demonstrated.run, [*questions, *wrong])
    # THEN it is said what the tools are for, and that none changes anything
    assert "a verdict says which rank, a trace says why" in instructions
    assert {name for name, _ in questions} < {tool.name for tool in tools}
    assert all(tool.annotations.read_only_hint for tool in tools)
    # AND it is answered, small, with what that stands on
    assert [error for _, error in answers] == [False] * len(questions) + [True] * len(wrong)
    assert all(len(text) <= 12_200 for text, _ in answers)
    health, verdicts, findings, whatif = (json.loads(text) for text, _ in answers[: len(questions)])
    assert 2 in health["cites"]["ranks"]
    assert any(capture in one["captures"] for one in verdicts["newest_first"])
    assert "train.py" in findings["cause"]
    assert findings["cites"]["ranks"] == [2]
    assert whatif["slowest_workers"][0]["rank"] == 2
    # AND what is not there is said, without more than that
    assert "there is no run ../run here" in answers[len(questions)][0]
