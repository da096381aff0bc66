"""Policies of tests, as text."""


def policy(*rules: str, steps: tuple[int, int, int] = (30, 10, 10), limits: str = "captures_per_run: 1") -> str:
    """A policy of rules in YAML's flow style; ``steps`` are those of a window, its stride and the warm-up."""
    window, stride, warmup = steps
    return f"""
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {{name: test}}
spec:
  detection: {{window_steps: {window}, stride_steps: {stride}, warmup_steps: {warmup}}}
  rules: [{", ".join(f"{{{rule}}}" for rule in rules)}]
  limits: {{{limits}}}
"""
