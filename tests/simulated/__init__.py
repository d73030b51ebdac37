"""A simulated accelerator: four devices `sim:0` … `sim:3` in the CPU's memory, which report every unordered access.

It is a backend of torch like any other (PrivateUse1): streams, events, an allocator with `record_stream`, pinned
memory, generators, autocast, and autograd's thread for each device. What a kernel computes, the CPU computes at once;
whether somebody was allowed to rely on it, vector clocks tell. So a machine without accelerators can show that a
program waits for all that it must wait for, whatever the timing. It cannot show what depends on real kernels: their
numbers and their speed, fragmented memory, links.

    build.py            compiles backend/ when it is first needed, and keeps the library
    backend/            the backend, in C++: machine.cpp has the clocks, device.cpp and kernels.cpp what torch asks for
    device_module.py    `torch.sim`
    host_order.py       what threads of the host know of each other's waiting
    communicator.py     a backend of torch.distributed for these devices, as strict as NCCL
    ranks.py            processes with a device each

A process that has loaded it has an accelerator, for good. So these tests run in a session of their own:
`pytest --simulated`.
"""
