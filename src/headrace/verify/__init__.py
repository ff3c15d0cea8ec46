"""Proof that a store holds what it says: structure, a re-extracted sample, meaning, and a name for what is wrong."""
