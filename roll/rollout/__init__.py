"""Prompts to finished, scored samples: plain asyncio, no Ray."""
