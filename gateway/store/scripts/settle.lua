-- Replaces a reservation by what was used, and gives its concurrency slot back.
-- ARGV: 2 tenant, 3 request id, 4 tokens used
-- Returns 1; 0 if there is no such reservation, after freeing the slot all the same.
return settle(ARGV[2], ARGV[3], tonumber(ARGV[4]))
