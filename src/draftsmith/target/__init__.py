"""Reading a target model: its text config, its few needed weights by exact key, its tokenizer and chat boundary."""
