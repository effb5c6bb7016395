"""What each rank holds of a model and its optimizer, and how it is saved and loaded under any plan."""
