"""``sftriage hub account``: what is asked for that cannot be, and where keys are made."""

import json

import pytest

pytest.importorskip("nkeys", reason="keys want the extra `nats`")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "--job-id is missing"),
        (("--namespace", "training", "--job-id", "job"), "no --job-id and no --host goes with it"),
        (("--namespace", "training", "--host", "node-0"), "no --job-id and no --host goes with it"),
        (("--namespace", "../elsewhere"), "--namespace ../elsewhere: no cluster has a namespace of that name"),
        (("--namespace", "Training"), "--namespace Training: no cluster has a namespace of that name"),
        (("--namespace", "vision", "--namespace", ""), "--namespace : no cluster has a namespace of that name"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(sftriage, tmp_path, arguments, expected):
    outcome = sftriage("hub", "account", *arguments, "--creds", tmp_path / "keys")
    # THEN it is said, and nothing is printed that a server would take
    assert (outcome.code, outcome.out) == (2, "")
    assert expected in outcome.err
    # AND no key is made out of its directory
    assert not (tmp_path / "elsewhere").exists()


def test_each_namespace_has_an_account_and_a_directory_of_keys(sftriage, tmp_path):
    made = [sftriage("hub", "account", "--namespace", "a", "--namespace", "b", "--creds", tmp_path) for _ in range(2)]
    accounts = json.loads(made[0].out)
    assert set(accounts) == {"sft_namespace_a", "sft_namespace_b"}
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.nk")} == {
        f"{namespace}/{who}.nk" for namespace in "ab" for who in ("agents", "controller")
    }
    # AND keys that are there are used again
    assert made[1].out == made[0].out
