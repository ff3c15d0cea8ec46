"""Extraction: rows through an inference engine into a store, verified, resumable and accounted for."""
