"""Export to an OpenTelemetry Collector: a sink with a bounded queue, and a thread that sends."""
