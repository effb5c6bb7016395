"""Commands that find out what there is: machines, and the times and sizes of layers."""
