"""The descriptor pool of this package's protocols.

Not protobuf's default pool: there `common.proto` and `vllm.grpc.engine` may exist already, in another version
(from `smg-grpc-proto` or vLLM), and a second definition is an error.
"""

from google.protobuf import descriptor_pool

POOL = descriptor_pool.DescriptorPool()
