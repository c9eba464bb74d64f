"""to_ and from_ every checkpoint format: vllm, speculators, sglang (SpecForge), eagle (SafeAILab)."""
