"""What is cached of a frozen prefix whose blocks lie on several ranks."""
