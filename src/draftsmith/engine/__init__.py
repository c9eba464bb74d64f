"""An installed vLLM or SGLang: find it, read its facts from source, launch it, trace its errors, remedy it."""
