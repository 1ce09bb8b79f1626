-- Forgets the shares of a gateway that ends, and has told all that it used.
-- ARGV: 2 gateway; then tenants
for i = 3, #ARGV do call('HDEL', shares_key(ARGV[i]), ARGV[2]) end
return 1
