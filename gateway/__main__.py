"""`python -m gateway` is the command line."""

from gateway.cli import main

if __name__ == "__main__":
    main(prog_name="idempotency-gateway")
