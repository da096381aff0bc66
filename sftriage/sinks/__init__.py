"""Subscribers to events, through one `stream`: the terminal, Prometheus, OpenTelemetry, webhooks."""
