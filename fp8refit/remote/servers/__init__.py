"""Engines in a process that takes orders: HTTP servers, actors, processes of the user's own.

Orders, the driver's end (`server_driver`, `http_client`) and the server's end (`http_endpoint`, `order_handler`).
"""
