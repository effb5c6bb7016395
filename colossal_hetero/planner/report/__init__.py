"""Plans and profiles for people: tables, pictures and launch commands."""
