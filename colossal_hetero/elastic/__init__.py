"""Training that goes on when nodes die and come: membership, agreement on what each rank holds, and moving it."""
