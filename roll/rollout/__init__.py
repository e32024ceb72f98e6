"""Generation of scored samples from prompts, in plain asyncio without Ray."""
