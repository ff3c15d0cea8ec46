"""Seeing a run from anywhere: status in a shell, a web page, a Prometheus endpoint, a report to hand on."""
