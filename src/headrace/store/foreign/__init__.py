"""States of other tools: read into a store, written out of one. One small class a layout, one loop each way."""
