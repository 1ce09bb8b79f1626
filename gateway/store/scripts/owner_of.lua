-- The gateway that holds a request's stream.
-- ARGV: 2 request id
-- Returns its id, or nil.
return call('HGET', request_key(ARGV[2]), 'owner')
