"""Files and text: JSON with schemas, atomic writes, pictures, numbers in words. Imports nothing of this package."""
