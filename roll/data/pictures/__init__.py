"""Pictures of rows: from the forms in which files hold them to patches and placeholder tokens."""
