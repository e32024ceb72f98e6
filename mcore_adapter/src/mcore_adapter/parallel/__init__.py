"""What a tensor parallel vocabulary and packed sequences need around a model."""
