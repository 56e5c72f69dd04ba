"""Experiments: questions, records, statistics, conclusions, figures."""
