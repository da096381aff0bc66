"""Policies of tests, as text."""


def policy(
    *rules: str,
    steps: tuple[int, int, int] = (30, 10, 10),
    detection: str | None = None,
    limits: str = "captures_per_run: 1",
    name: str = "test",
) -> str:
    """A policy of rules in YAML's flow style; ``steps`` (window, stride, warm-up) or all of ``detection``."""
    if detection is None:
        detection = ", ".join(f"{key}_steps: {n}" for key, n in zip(("window", "stride", "warmup"), steps, strict=True))
    return f"""
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {{name: {name}}}
spec:
  detection: {{{detection}}}
  rules: [{", ".join(f"{{{rule}}}" for rule in rules)}]
  limits: {{{limits}}}
"""
