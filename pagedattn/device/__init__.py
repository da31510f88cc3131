"""Running plans on a device that works by itself: a GPU, while the host plans ahead.

The logic, buckets, memory, staging and who samples where, stands apart from the calls
of CUDA (`cuda`), so that it runs and is tested without a card. Built in chapter 07.
"""
