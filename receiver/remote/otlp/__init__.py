"""Export to an OpenTelemetry Collector."""
