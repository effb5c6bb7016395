"""The examples' command lines: their flags, and the checks of what cannot work before any rank starts."""
