"""Who is told of events, through one `stream`: the terminal, Prometheus, OpenTelemetry, webhooks."""
