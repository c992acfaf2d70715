"""The idempotency gateway: a reverse proxy that makes unsafe HTTP requests safe to retry.

The modules form layers (ARCHITECTURE.md); a line imports only from the lines below it:
cli > demo > server > admin > store | upstream | metrics | log > exchange | janitor
> decision | routes | identity | fingerprint | wire > config > errors > model.
"""
