"""Holds the source of the plugin distribution `draftsmith_vllm` (plugin/ points here), so that draftsmith's wheel
carries it and `serve` can inject it by path. Nothing in draftsmith runs it; the engine's processes do."""
