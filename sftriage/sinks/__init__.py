"""Who is told of events: metrics, spans, webhooks."""
