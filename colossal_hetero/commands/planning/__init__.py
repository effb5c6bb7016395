"""Commands that plan, price and compare plans."""
