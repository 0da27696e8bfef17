"""Runs rdma-core's tests of the connection manager (tests.test_rdmacm) at the address that
VERBENA_ADDR has. By themselves the tests look for the network interface of the device in
sysfs, and take the interface's first address; a device of a loopback address has another one.

A process of a test that a signal ends fails the test; rdma-core's code overlooks it.
"""
import multiprocessing.context
import os
import signal
import sys
import unittest

sys.path.insert(0, os.path.join(sys.argv.pop(1), 'tests'))

from args_parser import parser  # noqa: E402

parser.parse_args()

import tests.base  # noqa: E402
import tests.test_rdmacm  # noqa: E402

started = []


class Process(multiprocessing.context.ForkProcess):
    def start(self):
        super().start()
        started.append(self)


multiprocessing.context.ForkContext.Process = Process


def get_address(self, dev, port, idx):
    self.args.append([dev, port, idx, os.environ['VERBENA_ADDR'], None])


def check_processes(self):
    self.assertTrue(started, 'the test has no processes')
    for p in started:
        p.join()
        # The test itself terminates processes that are to wait for ever.
        self.assertIn(p.exitcode, (0, -signal.SIGTERM), 'exit code of a process of the test')
    started.clear()


class Case(tests.test_rdmacm.CMTestCase):
    _get_ip_mac = get_address

    def tearDown(self):
        check_processes(self)
        super().tearDown()


if __name__ == '__main__':
    unittest.main()
