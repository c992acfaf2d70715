"""The sample legacy service (`ledger`) and the proof run that shows duplicates stopped. Nothing here is needed to
run the gateway, and nothing here is imported by it: both start as processes of their own.
"""
