"""Hidden states of captured rows: made by transformers or by vLLM, stored or streamed."""
