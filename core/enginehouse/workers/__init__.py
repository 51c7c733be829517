"""An engine in a worker process or thread, as the model manager uses it.

In the order in which a request passes the modules: ``client`` (server side), ``messages``, ``process``
and ``ipc`` (the link and its two ends), ``host`` and ``intake`` (worker side), and back to ``requests`` (server
side), which delivers the events. ``launch`` starts a worker, ``parts`` opens the optional parts of its engine,
``health`` detects hung threads and loads without progress, ``request_queue`` decides which requests are too many.
``media_bytes`` sends images and recordings, ``pool_calls`` waits for rows. ``fleet`` is an engine with several workers
elsewhere, ``remote`` the server's side of the link to one, ``sharing`` the worker's side, which several servers use.

Import from the modules: the processes that render chat templates use ``process`` and ``ipc``, and must stay small.
"""
